"""One set of numbers in every memory layout that a kernel may meet."""

from __future__ import annotations

import torch
from torch import Tensor


def poison(x: Tensor) -> Tensor:
    """What must not be read: NaN, or an index out of range."""
    return torch.full_like(x, torch.nan if x.is_floating_point() else -(2**40))


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "offset by one": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "every second": lambda x: torch.stack([x, poison(x)], -1).flatten(-2)[..., ::2],
    "gaps between rows": lambda x: torch.cat([x, poison(x[..., :1])], -1)[..., :-1],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x[:1].expand_as(x),
    "stride 0": lambda x: x.reshape(-1)[0].expand(x.shape),
}

SHAPES = [(), (0,), (1,), (3,), (0, 5), (5, 0), (3, 1, 7), (2, 3, 5, 7), (1, 8, 4, 4), (33, 65), (4099,)]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """``x`` (with the values of its first part, for the expanded layouts) in the named layout."""
    if x.numel() == 0 or x.dim() == 0:
        return x
    return LAYOUTS[layout](x)

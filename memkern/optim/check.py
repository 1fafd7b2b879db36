"""The pass over all gradients that comes before a step: are they finite, and how long are they together?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memkern import backends, ops
from memkern.optim.params import local


class Check(NamedTuple):
    """What the pass found: fp32 scalars on one device.

    Args:
        found_inf: not 0 where a gradient, divided by the loss scale, is not finite, or that scale is 0 or not finite.
        norm: L2 norm of all gradients, divided by the loss scale.
        clip: the factor that brings the norm down to ``max_norm``, at most 1.
    """

    found_inf: Tensor
    norm: Tensor
    clip: Tensor


def _shard_groups(tensor: Any) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over whose ranks a DTensor is split; none for any other tensor."""
    if not hasattr(tensor, "to_local"):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard())


def check(grads: Iterable[Tensor], grad_scale: Tensor | None, max_norm: float) -> Check:
    """Read every gradient once. Gradients split over ranks (DTensor) are checked and measured as a whole.

    Args:
        grads: at least one, on any devices.
        grad_scale: the loss scale in them, a scalar tensor, or None.
        max_norm: see :class:`Check`; infinity for no clipping.
    """
    parts = defaultdict(list)
    for grad in grads:
        piece = local(grad)
        parts[piece.device, backends.choose(piece), _shard_groups(grad)].append(piece)
    results = [
        (groups, ops.op(backend, "check_and_norm")(pieces, on(device, grad_scale), max_norm))
        for (device, backend, groups), pieces in parts.items()
    ]
    if len(results) == 1 and not results[0][0]:
        return Check(*results[0][1].unbind())
    found_inf, square = _over_ranks(results)
    norm = square.sqrt().float()
    return Check(found_inf.float(), norm, (max_norm / (norm + 1e-6)).nan_to_num(nan=1.0).clamp(max=1.0))


def _over_ranks(results: list[tuple[tuple[dist.ProcessGroup, ...], Tensor]]) -> tuple[Tensor, Tensor]:
    """found_inf and norm^2 of all parts. A norm is summed over the ranks that its part is split over.

    found_inf is summed over the ranks that any part is split over: whoever finds an infinity, also in a parameter
    that each rank has whole, all of them skip.
    """
    device = next((result.device for groups, result in results if groups), results[0][1].device)
    parts = [result[:2].to(device).double() for _, result in results]
    found_inf, squares = torch.stack([part[0] for part in parts]).sum(), [part[1].square() for part in parts]
    for group in dict.fromkeys(group for groups, _ in results for group in groups):
        split = [i for i, (groups, _) in enumerate(results) if group in groups]
        sums = torch.stack([found_inf, *(squares[i] for i in split)])
        dist.all_reduce(sums, group=group)
        found_inf = sums[0]
        for k, i in enumerate(split):
            squares[i] = sums[1 + k]
    return found_inf, torch.stack(squares).sum()


def on(device: torch.device, value: Tensor | None) -> Tensor | None:
    """A scalar tensor as the ops want it: fp32, on the device that reads it."""
    # Towards the CPU the copy has to be waited for: the host is what reads it there.
    return None if value is None else value.to(device, torch.float32, non_blocking=device.type != "cpu")

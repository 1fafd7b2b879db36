"""What every family's formulas share."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the widest floating dtype of its device."""
    return x.float() if x.device.type == "mps" else x.double()


def stored_like(x: Tensor, value: Tensor) -> Tensor:
    """``value`` rounded once to the dtype of ``x``, in its strides."""
    return torch.empty_like(x).copy_(value)

"""What every family's formulas share."""

from __future__ import annotations

from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in the widest floating dtype of its device."""
    return x.float() if x.device.type == "mps" else x.double()

"""What cross_entropy and linear_cross_entropy take, checked and brought to rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkern import backends
from memkern.functional.common import autocasts, dense, floating, integer, number, one_of
from memkern.functional.cross_entropy_autograd import CrossEntropy
from memkern.ops import computed_in

REDUCTIONS = ("none", "mean", "sum")
FP32 = torch.finfo(torch.float32)  # what the kernels hold the options in


@dataclass(frozen=True)
class Rows:
    """x: logits (rows, classes), or what they are made of, (rows, features); target: (rows,), or probabilities (rows,
    classes); shape: of a loss a row."""

    x: Tensor
    target: Tensor
    classes: int
    shape: Sequence[int]


def flat(x: Tensor) -> Tensor:
    """(..., n) as (rows, n), also where n is 0."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def target_rows(
    target: object, x: Tensor, dtype: torch.dtype, shape: Sequence[int], with_classes: Sequence[int], dim: int
) -> Tensor:
    """``target`` as the ops want it for logits of a dtype: (rows,) int64, or (rows, classes) of that dtype or float32.

    ``shape`` is what classes need; probabilities need ``with_classes``, with the classes in dimension ``dim``.
    """
    target = dense("target", target)
    if target.device != x.device:
        raise ValueError(f"target: got device {target.device}, needs that of input, {x.device}")
    probable = target.is_floating_point()
    if not probable and target.dtype not in (torch.int64, torch.uint8):
        raise TypeError(f"target: got dtype {target.dtype}, needs int64 or uint8 classes, or floating probabilities")
    if tuple(target.shape) != tuple(with_classes if probable else shape):
        raise ValueError(
            f"target: got {'probabilities' if probable else 'classes'} of shape {tuple(target.shape)}, needs classes"
            f" of shape {tuple(shape)} or floating probabilities of shape {tuple(with_classes)}"
        )
    if not probable:
        target = target if target.dim() == 1 else target.reshape(-1)
        return target if target.dtype == torch.int64 else target.long()
    wide = torch.promote_types(dtype, torch.float32)
    return flat((target if target.dtype in (dtype, wide) else target.to(wide)).movedim(dim, -1))


@dataclass(frozen=True)
class Options:
    """The options of both functions, under the names they have there but for ``weight_name``."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    weight_name: str = "weight"

    def check(self) -> None:
        """All that can be checked without tensors."""
        one_of("reduction", self.reduction, REDUCTIONS)
        integer("ignore_index", self.ignore_index, -(2**63))
        number("label_smoothing", self.label_smoothing, lambda v: 0 <= v <= 1, "0 to 1")
        number("z_loss", self.z_loss, lambda v: 0 <= v <= FP32.max, "0 to the largest float32")
        if self.softcap is not None:
            number("softcap", self.softcap, lambda v: FP32.tiny <= v <= FP32.max, "a normal float32 above 0, or None")

    def plan(self, rows: Rows) -> CrossEntropy:
        """What to compute of the rows, all options checked."""
        self.check()
        name, weight, x = self.weight_name, self.weight, rows.x
        if weight is not None:
            if tuple(floating(name, weight).shape) != (rows.classes,):
                raise ValueError(f"{name}: got shape {tuple(weight.shape)}, needs ({rows.classes},)")
            if weight.device != x.device:
                raise ValueError(f"{name}: got device {weight.device}, needs that of input, {x.device}")
        if rows.target.is_floating_point() and self.ignore_index >= 0:
            raise ValueError(f"ignore_index: got {self.ignore_index}, which does not go with probabilities")
        # The ops take float32 weights: for float64 logits these would be the least precise number of all.
        backend = "reference" if weight is not None and x.dtype == torch.float64 else backends.choose(x)
        softcap = float(self.softcap or 0)
        return CrossEntropy(self.ignore_index, float(self.label_smoothing), float(self.z_loss), softcap, backend)

    def weight_for(self, rows: Rows) -> Tensor | None:
        """The weights in the dtype that the rows are computed in."""
        return None if self.weight is None else self.weight.to(computed_in(rows.x))

    def reduced(self, loss: Tensor, rows: Rows) -> Tensor:
        """Of the losses (rows,), or of their sum, what the reduction makes of them."""
        if self.reduction == "none":
            return loss.reshape(rows.shape)
        if self.reduction == "sum":
            return loss.sum()
        divisor, nothing = self._divisor(rows)
        # Where nothing counts, the mean is NaN and, as PyTorch's, has a gradient of 0, not of 0 / 0. Where what counts
        # weighs nothing, PyTorch has 0 / 0 for both.
        return torch.where(nothing, torch.nan, loss.sum() / torch.where(nothing, 1, divisor))

    def _divisor(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """What a mean divides by, the weights of the classes of all rows, or with probabilities the number of rows; and
        whether no row counts."""
        target, weight = rows.target, self.weight_for(rows)
        if target.is_floating_point():
            divisor = torch.full((), target.shape[0] if rows.classes else 0, device=target.device)
            return divisor, divisor == 0
        counted = target != self.ignore_index
        if weight is None:
            divisor = counted.sum()
            return divisor, divisor == 0
        # A class that is ignored or out of range weighs nothing, and no index leaves the weights.
        known = counted & (target >= 0) & (target < rows.classes)
        weights = torch.cat([weight, weight.new_zeros(1)])[torch.where(known, target, rows.classes)]
        return weights.sum(), ~counted.any()


def loss_dtype(x: Tensor) -> torch.dtype:
    """Of the loss, as PyTorch's: that of ``x``, and float32 under autocast."""
    return computed_in(x) if autocasts(x) else x.dtype

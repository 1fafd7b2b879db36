"""LAMB (You et al. 2020, arXiv:1904.00962)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkern import ops
from memkern.optim.common import Batch, FusedOptimizer
from memkern.optim.ranges import betas_in_range, not_negative


class LAMB(FusedOptimizer):
    """Adam's update, rescaled for each parameter tensor to the tensor's own norm: for very large batches.

    With Adam's bias-corrected averages m and v: ``u = m / (sqrt(v) + eps) + weight_decay p`` and
    ``p <- p - lr |p| / |u| u``, where the ratio is 1 if either norm is 0. Algorithm 2 of the paper, with the
    identity for its function phi.

    Args:
        params: parameters, named parameters, or groups of them; float16, bfloat16, float32 or float64.
        lr: a number, or a one-element tensor, which is read on the device.
        betas, eps, weight_decay: as above.
        maximize: ascend.
        max_grad_norm, master_weights, write_unscaled_grads: see :class:`~memkern.optim.common.FusedOptimizer`.

    Raises:
        ValueError: a value out of range, in a group too.
        TypeError: a parameter that is not a real floating tensor, or is split over ranks (DTensor).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: torch.dtype | None = None,
        write_unscaled_grads: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, max_grad_norm, master_weights, write_unscaled_grads)

    def _check_group(self, group: dict[str, Any], new: bool) -> None:
        betas_in_range(group)
        not_negative(group, "eps", "weight_decay")
        if any(hasattr(p, "to_local") for p in group["params"]):
            raise TypeError("params: got a DTensor, needs plain tensors: LAMB's norms are not taken across ranks")

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        ops.op(batch.backend, "lamb_step")(
            batch.params,
            batch.grads,
            *batch.states,
            batch.masters,
            batch.steps,
            *on_device,
            *map(float, group["betas"]),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group["maximize"]),
            self.write_unscaled_grads,
        )

"""Lion (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkern import ops
from memkern.optim.common import Batch, FusedOptimizer
from memkern.optim.ranges import betas_in_range, not_negative


class Lion(FusedOptimizer):
    """Steps of one size, ``lr``, along the sign of an average: one state a parameter where Adam has two.

    With gradient g: ``p <- (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g)``, then
    ``m <- beta2 m + (1 - beta2) g``. The paper's ``lr`` is 3 to 10 times below AdamW's and its weight decay as
    much above.

    Args:
        params: parameters, named parameters, or groups of them; float16, bfloat16, float32 or float64.
        lr: a number, or a one-element tensor, which is read on the device.
        betas: for the direction, and for the average.
        weight_decay: decoupled from the gradient.
        maximize: ascend.
        max_grad_norm, master_weights, write_unscaled_grads: see :class:`~memkern.optim.common.FusedOptimizer`.

    Raises:
        ValueError: a value out of range, in a group too.
        TypeError: a parameter that is not a real floating tensor.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: torch.dtype | None = None,
        write_unscaled_grads: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, max_grad_norm, master_weights, write_unscaled_grads)

    def _check_group(self, group: dict[str, Any], new: bool) -> None:
        betas_in_range(group)
        not_negative(group, "weight_decay")

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return False

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        ops.op(batch.backend, "lion_step")(
            batch.params,
            batch.grads,
            batch.states[0],
            batch.masters,
            *on_device,
            *map(float, group["betas"]),
            float(group["weight_decay"]),
            bool(group["maximize"]),
            self.write_unscaled_grads,
        )

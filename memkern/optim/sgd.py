"""Stochastic gradient descent, with momentum as PyTorch defines it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memkern import ops
from memkern.optim.common import Batch, FusedOptimizer
from memkern.optim.ranges import not_negative


class SGD(FusedOptimizer):
    """In place of ``torch.optim.SGD``: arguments, defaults and results are its own.

    The state has a ``step`` beside ``momentum_buffer``: the first step that is not skipped fills the buffer
    with the gradient, undampened, and only the device knows which one that is.

    Args:
        params: parameters, named parameters, or groups of them; float16, bfloat16, float32 or float64.
        lr: a number, or a one-element tensor, which is read on the device.
        momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        foreach, differentiable, fused: kept for checkpoints; there is one implementation here.
        max_grad_norm, master_weights, write_unscaled_grads: see :class:`~memkern.optim.common.FusedOptimizer`.

    Raises:
        ValueError: a value out of range, in a group too.
        TypeError: a parameter that is not a real floating tensor.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        master_weights: torch.dtype | None = None,
        write_unscaled_grads: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, max_grad_norm, master_weights, write_unscaled_grads)

    def _check_group(self, group: dict[str, Any], new: bool) -> None:
        not_negative(group, "momentum", "weight_decay")
        if not abs(group["dampening"]) < math.inf:
            raise ValueError(f"dampening: got {group['dampening']}, needs a finite number")
        if new and group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov: got True with momentum {group['momentum']} and dampening {group['dampening']}, "
                "needs a momentum above 0 and no dampening"
            )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return group["momentum"] != 0

    def _needed_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names(group)  # torch's has no step

    def _missing_states(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
        made = super()._missing_states(group, p, state)
        if "step" in made and "momentum_buffer" in state:  # from torch: the buffer has had its first step
            made["step"].fill_(1)
        return made

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        ops.op(batch.backend, "sgd_step")(
            batch.params,
            batch.grads,
            batch.states[0] if batch.states else [],
            batch.masters,
            batch.steps,
            *on_device,
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
            bool(group["maximize"]),
            self.write_unscaled_grads,
        )

"""Adam (Kingma & Ba 2015, arXiv:1412.6980) and AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkern import ops
from memkern.optim.common import Batch, FusedOptimizer
from memkern.optim.ranges import betas_in_range, not_negative


class Adam(FusedOptimizer):
    """In place of ``torch.optim.Adam``: arguments, defaults and results are its own.

    Args:
        params: parameters, named parameters, or groups of them; float16, bfloat16, float32 or float64.
        lr: a number, or a one-element tensor, which is read on the device.
        betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch.
        foreach, capturable, differentiable, fused: kept for checkpoints; there is one implementation here.
        max_grad_norm, master_weights, write_unscaled_grads: see :class:`~memkern.optim.common.FusedOptimizer`.

    Raises:
        ValueError: a value out of range, in a group too.
        TypeError: a parameter that is not a real floating tensor.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        master_weights: torch.dtype | None = None,
        write_unscaled_grads: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, max_grad_norm, master_weights, write_unscaled_grads)

    def _check_group(self, group: dict[str, Any], new: bool) -> None:
        betas_in_range(group)
        not_negative(group, "eps", "weight_decay")

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        averages, squares, *maxima = batch.states
        ops.op(batch.backend, "adamw_step")(
            batch.params,
            batch.grads,
            averages,
            squares,
            maxima[0] if maxima else [],
            batch.masters,
            batch.steps,
            *on_device,
            *map(float, group["betas"]),
            float(group["eps"]),
            float(group["weight_decay"]),
            bool(group["decoupled_weight_decay"]),
            bool(group["maximize"]),
            self.write_unscaled_grads,
        )


class AdamW(Adam):
    """In place of ``torch.optim.AdamW``; see :class:`Adam`. Weight decay is decoupled."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        master_weights: torch.dtype | None = None,
        write_unscaled_grads: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            max_grad_norm=max_grad_norm,
            master_weights=master_weights,
            write_unscaled_grads=write_unscaled_grads,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # whatever checkpoint they came from
            group["decoupled_weight_decay"] = True

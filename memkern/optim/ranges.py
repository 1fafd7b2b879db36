"""Ranges of the optimizers' numbers, checked for every parameter group."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def check_lr(group: dict[str, Any], new: bool) -> None:
    """Not ``new``: at a step, where a tensor is not read, and a schedule may have ended a rounding error below 0."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: got a tensor of shape {tuple(lr.shape)}, needs one element")
    if new or not isinstance(lr, Tensor):
        in_range(lr >= (0 if new else -math.inf), "lr", lr)


def betas_in_range(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if len(betas) != 2:
        raise ValueError(f"betas: got {betas}, needs two numbers")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}]: got {beta}, needs a number of at least 0 and below 1")


def not_negative(group: dict[str, Any], *names: str) -> None:
    for name in names:
        in_range(group[name] >= 0, name, group[name])


def in_range(right: bool | Tensor, name: str, value: Any) -> None:
    if not right:
        raise ValueError(f"{name}: got {value}, needs a number of at least 0")

"""Ranges of the optimizers' numbers, checked for every parameter group."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_lr(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr: got a tensor of shape {tuple(lr.shape)}, needs one element")
    if not lr >= 0:
        raise ValueError(f"lr: got {lr}, needs a number of at least 0")


def betas_in_range(group: dict[str, Any]) -> None:
    for i, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}]: got {beta}, needs a number of at least 0 and below 1")


def not_negative(group: dict[str, Any], *names: str) -> None:
    for name in names:
        if not group[name] >= 0:
            raise ValueError(f"{name}: got {group[name]}, needs a number of at least 0")

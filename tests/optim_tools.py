"""What the tests of the optimizer classes share."""

from __future__ import annotations

import torch
from torch import Tensor

import memkern
from memkern.optim import LAMB, SGD, Adam, AdamW, Lion

OPTIMIZERS = {
    "AdamW": lambda params, **more: AdamW(params, lr=0.1, **more),
    "Adam": lambda params, **more: Adam(params, lr=0.1, weight_decay=0.1, amsgrad=True, **more),
    "SGD": lambda params, **more: SGD(params, lr=0.1, momentum=0.9, **more),
    "plain SGD": lambda params, **more: SGD(params, lr=0.1, **more),
    "LAMB": lambda params, **more: LAMB(params, lr=0.1, **more),
    "Lion": lambda params, **more: Lion(params, lr=0.1, **more),
}
SCALERS = {"torch": torch.amp.GradScaler, "memkern": memkern.amp.GradScaler}


def parameter(device: str, value: float = 1.0, n: int = 5, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((n,), value, dtype=dtype, device=device))


def set_grad(p: Tensor, value: float, dtype: torch.dtype | None = None) -> None:
    p.grad = torch.full_like(p, value, dtype=dtype)


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        tensors += [state[key] for key in sorted(state)]
    return [tensor.clone() for tensor in tensors]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

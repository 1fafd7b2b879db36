"""GELU: memkern's, and ``torch.nn.functional.gelu``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from benchmarks.harness import Case, Family, Function

APPROXIMATE = {"erf": "none", "tanh": "tanh"}  # by form
SMALL, MIDDLE, LARGE = 2**16, 2**22, 2**26  # elements

# Forward reads x and writes y; backward reads dy and x and writes dx.
TENSORS_MOVED = {"forward": 2, "backward": 3, "both": 5}


def case(form: str, size: int, dtype: torch.dtype, direction: str) -> Case:
    return Case(form, (size,), dtype, direction, bytes=TENSORS_MOVED[direction] * dtype.itemsize * size)


def cases(device: str, quick: bool) -> list[Case]:
    if quick:
        dtypes = (torch.bfloat16, torch.float32)
        small = [case("erf", SMALL, dtype, direction) for dtype in dtypes for direction in ("forward", "backward")]
        return small + [case("erf", MIDDLE, dtype, "both") for dtype in dtypes]
    return [
        case(form, size, dtype, direction)
        for form in APPROXIMATE
        for size in ((SMALL, MIDDLE, LARGE) if device == "cuda" else (SMALL, MIDDLE))
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for direction in TENSORS_MOVED
    ]


def inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(case.shape, dtype=case.dtype, device=device, requires_grad=True)
    return x, torch.randn_like(x)


def baseline(case: Case) -> Function:
    return lambda x: F.gelu(x, approximate=APPROXIMATE[case.form])


def fused(case: Case) -> Function:
    return lambda x: memkern.functional.gelu(x, approximate=APPROXIMATE[case.form])


FAMILY = Family(
    name="gelu",
    formula="bytes: element size times number of elements, times 2 forward (x, y), 3 backward (dy, x, dx), 5 both",
    cases=cases,
    inputs=inputs,
    baseline=baseline,
    fused=fused,
)

"""LayerNorm, RMSNorm and addition + LayerNorm: memkern's, PyTorch's, and liger-kernel's where it is installed."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from benchmarks.harness import Case, Family, Function

FORMS = ("layer", "rms", "add layer")
DIRECTIONS = ("forward", "backward", "both")
HIDDEN = (64, 256, 768, 1024, 4096, 8192, 16384, 65536, 262144)
FEW = 64  # rows
ELEMENTS = {"cuda": 2**26, "cpu": 2**22}  # of the cases with many rows
EPS = 1e-5


def bytes_moved(form: str, rows: int, hidden: int, size: int, direction: str) -> int:
    """Each tensor once. Parameters are of the input's dtype, of ``size`` bytes; statistics are fp32."""
    tensors = {"forward": 4, "backward": 4} if form == "add layer" else {"forward": 2, "backward": 3}
    parameters, statistics = (1, 1) if form == "rms" else (2, 2)
    forward = size * hidden * (tensors["forward"] * rows + parameters) + 4 * statistics * rows
    # Backward reads the weight, and writes as many gradients as there are parameters.
    backward = size * hidden * (tensors["backward"] * rows + 1 + parameters) + 4 * statistics * rows
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def case(form: str, rows: int, hidden: int, dtype: torch.dtype, direction: str) -> Case:
    return Case(form, (rows, hidden), dtype, direction, bytes_moved(form, rows, hidden, dtype.itemsize, direction))


def cases(device: str, quick: bool) -> list[Case]:
    if quick:
        dtypes = (torch.bfloat16, torch.float32)
        found = [case("layer", 4096, 1024, dtype, direction) for dtype in dtypes for direction in DIRECTIONS]
        return found + [case(form, 4096, 1024, dtype, "both") for form in FORMS[1:] for dtype in dtypes]
    found = []
    for hidden in HIDDEN:
        for rows in dict.fromkeys((ELEMENTS[device] // hidden, FEW)):
            found += [case("layer", rows, hidden, torch.bfloat16, direction) for direction in DIRECTIONS]
            found += [case(form, rows, hidden, torch.bfloat16, "both") for form in FORMS[1:]]
    found += [case("layer", 4096, 1024, dtype, "both") for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    found += [case("add layer", 4096, 1024, torch.float32, "both")]
    return list(dict.fromkeys(found))


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """x, residual where there is one, weight, bias where there is one; and dy, for each output."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device=device, requires_grad=True)

    added = [randn(*case.shape)] if case.form == "add layer" else []
    bias = [] if case.form == "rms" else [randn(case.shape[1])]
    return randn(*case.shape), *added, randn(case.shape[1]), *bias, randn(*case.shape).detach()


def _torch_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _torch_rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_add_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    summed = x + residual
    return F.layer_norm(summed, weight.shape, weight, bias, EPS), summed


def baseline(case: Case) -> Function:
    return {"layer": _torch_layer, "rms": _torch_rms, "add layer": _torch_add_layer}[case.form]


def fused(case: Case) -> Function:
    functional = memkern.functional
    function = {"layer": functional.layer_norm, "rms": functional.rms_norm, "add layer": functional.add_layer_norm}
    before_shape = 2 if case.form == "add layer" else 1

    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        shape = case.shape[1:]
        return function[case.form](*tensors[:before_shape], shape, *tensors[before_shape:], eps=EPS)

    return call


def liger(case: Case) -> Function:
    from liger_kernel.transformers.functional import liger_layer_norm, liger_rms_norm

    if case.form == "layer":
        return partial(liger_layer_norm, eps=EPS)
    if case.form == "rms":  # its default overwrites dy, which the next call still needs
        return partial(liger_rms_norm, eps=EPS, in_place=False)
    raise NotImplementedError("liger-kernel has no addition + LayerNorm")


FAMILY = Family(
    name="norm",
    formula=(
        "bytes: element size times number of elements, times 2 forward (x, y), 3 backward (dy, x, dx), 5 both; "
        "4, 4 and 8 with a residual; and the statistics, parameters and their gradients"
    ),
    cases=cases,
    inputs=inputs,
    baseline=baseline,
    fused=fused,
    peers={"liger-kernel": liger} if importlib.util.find_spec("liger_kernel") else {},
)

"""Softmax, log-softmax and the softmax of attention: memkern's, PyTorch's, and liger-kernel's where it is installed."""

from __future__ import annotations

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from benchmarks.harness import Case, Family, Function

ROWS = ("softmax", "log softmax")  # of (rows, width), over the width
INNER = "inner softmax"  # of (rows, width), over the rows
ATTENTION = ("masked", "biased", "causal", "dropout")  # of (heads, queries, keys): scale, and one thing more
DIRECTIONS = ("forward", "backward", "both")
WIDTHS = (64, 128, 512, 1024, 2048, 4096, 16384, 65536, 262144)
ELEMENTS = {"cuda": 2**26, "cpu": 2**22}
SCALE, DROPOUT = 0.125, 0.1


def bytes_moved(form: str, shape: tuple[int, ...], size: int, direction: str) -> int:
    """Each tensor once: x and y, then dy, y and dx. Of a causal row, only the part that a query sees is read."""
    elements = math.prod(shape)
    read = elements
    if form == "causal":
        heads, queries, keys = shape
        read = heads * sum(min(query + 1 + keys - queries, keys) for query in range(queries))
    mask = math.prod(shape[1:]) * {"masked": 1, "biased": size}.get(form, 0)
    dropped = elements if form == "dropout" else 0  # written beside y
    forward = size * (read + elements + dropped) + mask
    backward = size * (2 * read + elements)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def case(form: str, shape: tuple[int, ...], dtype: torch.dtype, direction: str) -> Case:
    return Case(form, shape, dtype, direction, bytes_moved(form, shape, dtype.itemsize, direction))


def cases(device: str, quick: bool) -> list[Case]:
    attention = (ELEMENTS[device] // 2**20, 1024, 1024)
    if quick:
        found = [case("softmax", (4096, 1024), torch.bfloat16, direction) for direction in DIRECTIONS]
        found += [case(form, (4096, 1024), torch.bfloat16, "both") for form in (*ROWS[1:], INNER)]
        return found + [case(form, attention, torch.bfloat16, "both") for form in ATTENTION]
    found = []
    for width in WIDTHS:
        shape = (ELEMENTS[device] // width, width)
        found += [case("softmax", shape, torch.bfloat16, direction) for direction in DIRECTIONS]
        found += [case(form, shape, torch.bfloat16, "both") for form in (*ROWS[1:], INNER)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found += [case("softmax", (4096, 1024), dtype, "both")]
        found += [case(form, attention, dtype, direction) for form in ATTENTION for direction in DIRECTIONS]
    return list(dict.fromkeys(found))


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """x, the mask or bias where there is one, and dy."""
    x = torch.randn(case.shape, dtype=case.dtype, device=device, requires_grad=True)
    masks = {
        "masked": lambda: torch.rand(case.shape[1:], device=device) > 0.9,
        "biased": lambda: torch.randn(case.shape[1:], dtype=case.dtype, device=device),
    }
    mask = [masks[case.form]()] if case.form in masks else []
    return x, *mask, torch.randn_like(x)


def _unfused_masked(x: Tensor, mask: Tensor) -> Tensor:
    return (x * SCALE).masked_fill(mask, -math.inf).softmax(-1)


def _unfused_causal(x: Tensor) -> Tensor:
    queries, keys = x.shape[-2:]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
    return _unfused_masked(x, mask)


def baseline(case: Case) -> Function:
    return {
        "softmax": lambda x: F.softmax(x, -1),
        "log softmax": lambda x: F.log_softmax(x, -1),
        INNER: lambda x: F.softmax(x, 0),
        "masked": _unfused_masked,
        "biased": lambda x, bias: (x * SCALE + bias).softmax(-1),
        "causal": _unfused_causal,
        "dropout": lambda x: F.dropout((x * SCALE).softmax(-1), DROPOUT),
    }[case.form]


def fused(case: Case) -> Function:
    functional = memkern.functional
    return {
        "softmax": lambda x: functional.softmax(x, -1),
        "log softmax": lambda x: functional.log_softmax(x, -1),
        INNER: lambda x: functional.softmax(x, 0),
        "masked": lambda x, mask: functional.scaled_masked_softmax(x, mask, SCALE),
        "biased": lambda x, bias: functional.scaled_masked_softmax(x, bias, SCALE),
        "causal": lambda x: functional.scaled_masked_softmax(x, None, SCALE, causal="bottom_right"),
        "dropout": lambda x: functional.scaled_masked_softmax(x, None, SCALE, dropout=DROPOUT),
    }[case.form]


def liger(case: Case) -> Function:
    from liger_kernel.transformers.functional import liger_softmax

    if case.form != "softmax":
        raise NotImplementedError("liger-kernel has the softmax of rows only")
    return liger_softmax


FAMILY = Family(
    name="softmax",
    formula=(
        "bytes: element size times number of elements, times 2 forward (x, y), 3 backward (dy, y, dx), 5 both; of a "
        "causal row only what is seen is read; and the mask once, and what dropout writes"
    ),
    cases=cases,
    inputs=inputs,
    baseline=baseline,
    fused=fused,
    peers={"liger-kernel": liger} if importlib.util.find_spec("liger_kernel") else {},
)

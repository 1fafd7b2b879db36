"""What every family's kernels share."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from memkern.backends import interpreting
from memkern.ops import check_like

_INTERPRETING = tl.constexpr(interpreting())


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """``value`` (fp32) rounded to nearest in ``dtype``. The interpreter cuts bf16 off instead: rounded by hand there."""
    if _INTERPRETING and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (up & -65536).to(tl.float32, bitcast=True), value)
    return value.to(dtype)


def is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense(x: Tensor) -> Tensor:
    """``x`` itself where it is dense, else a dense copy."""
    return x if x.numel() == 0 or is_dense(x) else torch.empty_like(x).copy_(x)


def in_order_of(x: Tensor, y: Tensor, name: str) -> Tensor:
    """``y``, which has the shape and dtype of ``x``, in the memory order of ``x`` (which is dense)."""
    check_like(name, y, x)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)


def launch(kernel, grid: tuple[int, ...], x: Tensor, *arguments, **meta) -> None:
    """Start ``kernel`` on the device of ``x``."""
    device = torch.get_device_module(x.device).device(x.device) if x.device.type != "cpu" else contextlib.nullcontext()
    with device:
        wrap_triton(kernel)[grid](*arguments, **meta)

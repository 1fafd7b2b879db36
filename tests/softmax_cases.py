"""Calls of the softmax ops, the same in fp64 on PyTorch, and how close they are to be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memkern import ops
from tests.norm_cases import HALVES
from tests.ulp import spacing, ulp_error

INF = math.inf


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().cpu().double()


def forward(backend: str, x, mask=None, dim=-1, scale=1.0, causal=False, log=False, zero_masked=False,
            dropout=0.0, seed=None, dtype=None):  # fmt: skip
    """y, and what dropout makes of it; ``mask`` is broadcast."""
    mask = None if mask is None else mask.expand(x.shape)
    dtype = x.dtype if dtype is None else dtype
    op = ops.op(backend, "softmax_forward")
    return op(x, mask, dim % x.dim(), scale, causal, log, zero_masked, dropout, seed, dtype)


def backward(backend: str, dy, y, dim=-1, scale=1.0, causal=False, log=False, dropout=0.0, seed=None, dtype=None):
    dtype = y.dtype if dtype is None else dtype
    return ops.op(backend, "softmax_backward")(dy, y, dim % y.dim(), scale, causal, log, dropout, seed, dtype)


def live_keys(x: Tensor) -> Tensor:
    """Which keys (the last dimension) a query sees under causal masking: all of them for the last query."""
    queries, keys = x.shape[-2:]
    return torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries


def exact_forward(x, mask=None, dim=-1, scale=1.0, causal=False, log=False, zero_masked=False) -> Tensor:
    z = wide(x) * scale
    if mask is not None:
        z = torch.where(mask.cpu(), -INF, z) if mask.dtype == torch.bool else z + wide(mask)
    if causal:
        z = torch.where(live_keys(x), z, -INF)
    if log:
        return torch.log_softmax(z, dim)
    y = torch.softmax(z, dim)
    return torch.where((z == -INF).all(dim, keepdim=True), 0.0, y) if zero_masked else y


def exact_backward(dy, y, dim=-1, scale=1.0, log=False) -> tuple[Tensor, Tensor]:
    """dx, and the magnitude of the terms that make it up."""
    dy, y = wide(dy), wide(y)
    if log:
        dx = dy - y.exp() * dy.sum(dim, keepdim=True)
        return scale * dx, abs(scale) * (dy.abs() + y.exp() * dy.abs().sum(dim, keepdim=True))
    dx = y * (dy - (dy * y).sum(dim, keepdim=True))
    return scale * dx, abs(scale) * y * (dy.abs() + (dy * y).abs().sum(dim, keepdim=True))


def plain_chain(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    """What scaled_masked_softmax is one pass of."""
    z = x * scale
    if mask is not None:
        z = z.masked_fill(mask, -INF) if mask.dtype == torch.bool else z + mask
    if causal:
        queries, keys = x.shape[-2:]
        z = z.masked_fill(torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1), -INF)
    return z.softmax(-1)


def value_and_gradient(f, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = f(x)
    y.backward(dy)
    return y.detach(), x.grad


def epsilon(dtype: torch.dtype) -> float:
    """Of the arithmetic."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def assert_probabilities(y: Tensor, exact: Tensor, exponents: float = 24.0) -> None:
    """Within 1 ulp in 16 bits; else also what rounding exponents of that magnitude costs."""
    assert y.shape == exact.shape and y.is_contiguous()
    if y.numel():
        limit = 1 if y.dtype in HALVES else 6 + exponents
        error = ulp_error(y, exact)
        assert error.max() <= limit, f"{error.max():.2f} ulp at {error.argmax()}"


def assert_log_probabilities(y: Tensor, exact: Tensor) -> None:
    """Within 1 ulp in 16 bits, of the value or (where it is near 0) of 2^-10; else 4, of the value or 1."""
    assert y.shape == exact.shape and y.is_contiguous()
    if y.numel():
        limit, least = (1, 2.0**-10) if y.dtype in HALVES else (4, 1.0)
        error = (wide(y) - exact).abs() / spacing(exact.abs().clamp(min=least), y.dtype)
        error = torch.where((wide(y) == exact) | (y.cpu().isnan() & exact.isnan()), 0.0, error)
        assert error.max() <= limit, f"{error.max():.2f} ulp at {error.argmax()}"


def assert_gradient(dx: Tensor, dy: Tensor, y: Tensor, dim=-1, scale=1.0, log=False) -> None:
    """One rounding of the result, and a few of the arithmetic's on the terms."""
    exact, terms = exact_backward(dy, y, dim, scale, log)
    assert dx.shape == exact.shape and dx.is_contiguous()
    if dx.numel():
        y_digits = wide(y).abs().clamp(max=100).nan_to_num(0) if log else 0  # exp(y) amplifies what y is off by
        allowed = 0.501 * spacing(exact, dx.dtype) + (16 + y_digits) * epsilon(y.dtype) * terms
        excess = (wide(dx) - exact).abs() - allowed
        same = (dx.cpu() == exact.to(dx.dtype)) | (dx.cpu().isnan() & exact.isnan())  # infinite, or NaN
        assert ((excess <= 0) | same).all(), f"{excess.max()} too much at {excess.argmax()}"

"""Calls of the norms, on memkern and in fp64 on PyTorch, and how to compare them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import functional

KINDS = ("layer_norm", "rms_norm")
each_kind = pytest.mark.parametrize("kind", KINDS)
HALVES = (torch.float16, torch.bfloat16)


def call(kind: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape, **options):
    """memkern's function: (y,) or (y, summed)."""
    parameters = {"weight": weight, "bias": bias} if kind == "layer_norm" else {"weight": weight}
    if residual is None:
        return (getattr(functional, kind)(x, shape, **parameters, **options),)
    return getattr(functional, f"add_{kind}")(x, residual, shape, **parameters, **options)


def exact_call(kind, x, residual, weight, bias, shape, eps=None, zero_centred=False):
    """The same by PyTorch, for fp64 tensors; ``summed`` is not rounded."""
    x = x if residual is None else x + residual
    weight = 1 + weight if zero_centred else weight
    if kind == "layer_norm":
        y = F.layer_norm(x, shape, weight, bias, 1e-5 if eps is None else eps)
    else:
        y = F.rms_norm(x, shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)
    return (y,) if residual is None else (y, x)


def gradients(f, tensors: list[Tensor | None], grads: tuple[Tensor, ...]) -> tuple[list[Tensor], list]:
    """Outputs of ``f`` at fresh leaves, and the gradient of each one that is given."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    outputs = f(*leaves)
    torch.autograd.backward(outputs, grads)
    return [o.detach() for o in outputs], [None if leaf is None else leaf.grad for leaf in leaves]


def assert_close(actual: Tensor, exact: Tensor, ulps: float = 2.0, of: torch.dtype | None = None) -> None:
    """Within that many ulp (``of`` a dtype; its own), at the magnitude of each value or of the tensor's rms."""
    assert actual.shape == exact.shape
    if actual.numel() == 0:
        return
    exact = exact.cpu().double()
    scale = torch.maximum(exact.abs(), exact.square().mean().sqrt())
    error = (actual.cpu().double() - exact).abs() / (scale * torch.finfo(of or actual.dtype).eps + 1e-300)
    assert error.max() <= ulps, f"{error.max():.2f} ulp, at {error.argmax()}"


def check(kind, x, residual, weight, bias, shape, dy=None, ulps=3.0, **options) -> None:
    """Outputs and all gradients of the function against fp64."""
    tensors = [x, residual, weight, bias if kind == "layer_norm" else None]
    if dy is None:
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    grads = (dy,) if residual is None else (dy, 2 * dy)
    wide = [None if t is None else t.cpu().double() for t in tensors]
    plain = {key: value for key, value in options.items() if key in ("eps", "zero_centred")}
    wide_grads = tuple(g.cpu().double() for g in grads)
    outputs, found = gradients(lambda *t: call(kind, *t, shape, **options), tensors, grads)
    expected, exact = gradients(lambda *t: exact_call(kind, *t, shape, **plain), wide, wide_grads)
    for actual, value in zip(outputs, expected, strict=True):
        assert actual.dtype == x.dtype and actual.is_contiguous()
        assert_close(actual, value, ulps)
    for tensor, actual, value in zip(tensors, found, exact, strict=True):
        if tensor is not None:
            assert actual.dtype == tensor.dtype
            rounded = x.dtype if options.get("memory_efficient") else tensor.dtype
            summed_up = (x.numel() / max(tensor.numel(), 1)) ** 0.5  # a sum over rows: its error is a random walk
            assert_close(actual, value, 2 * ulps + summed_up / 20, of=rounded)


def parameters(shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A weight between 0.5 and 1.5, and a bias."""
    generator = torch.Generator().manual_seed(2)
    weight = 0.5 + torch.rand(shape, generator=generator)
    return weight.to(device, dtype), torch.randn(shape, generator=generator).to(device, dtype)


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return (*HALVES, torch.float32) if backend == "triton" else (*HALVES, torch.float32, torch.float64)


def needs_fp64(backend: str) -> None:
    if backend == "triton":
        pytest.skip("the triton backend does not serve fp64")


def saved_tensors(f) -> tuple[Tensor, list[int]]:
    """The output of ``f``, and where what it saves lies."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        (y,) = f()
    return y, saved

"""Derivatives of the softmax functions of every kind, function transforms, compiling and tracing, on every backend."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F

import memkern
from memkern import functional
from memkern.functional import log_softmax, scaled_masked_softmax, softmax
from tests.norm_cases import needs_fp64
from tests.softmax_cases import plain_chain, random, value_and_gradient

BOTH = pytest.mark.parametrize("name", ("softmax", "log_softmax"))


def attention_like(dropout: float = 0.0):
    def f(x):
        torch.manual_seed(0)
        return scaled_masked_softmax(x, scale=0.7, causal="bottom_right", fully_masked="zero", dropout=dropout)

    return f


DERIVED = {
    "softmax": lambda x: softmax(x, 1),
    "log_softmax": lambda x: log_softmax(x, -1),
    "an inner log_softmax": lambda x: log_softmax(x, 0),
    "bool mask": lambda x: scaled_masked_softmax(x, x.detach() > 0.5, 0.7, fully_masked="zero"),
    "causal": attention_like(),
    "dropout": attention_like(0.4),
}


@pytest.mark.parametrize("case", DERIVED)
def test_derivatives_of_every_kind(backend, device, case) -> None:
    needs_fp64(backend)
    x = random(2, 4, 3).to(device).double().requires_grad_()
    batched = case != "dropout"  # random numbers under gradcheck's vmap are an error
    assert torch.autograd.gradcheck(
        DERIVED[case], x, check_batched_grad=batched, check_forward_ad=True, check_batched_forward_grad=batched
    )
    assert torch.autograd.gradgradcheck(DERIVED[case], x, check_fwd_over_rev=True, check_rev_over_rev=True)


@BOTH
def test_function_transforms(backend, device, name) -> None:
    ours, torchs = getattr(functional, name), getattr(F, name)
    x = random(6, 3, 8).to(device)

    def both(transform, rtol=1e-3):
        torch.testing.assert_close(
            transform(lambda x: ours(x, -1).pow(3)), transform(lambda x: torchs(x, -1).pow(3)), rtol=rtol, atol=1e-4
        )

    def sum_of(f):
        return lambda x: f(x).sum()

    both(lambda f: torch.vmap(f)(x))
    both(lambda f: torch.vmap(f, 1, 2)(x))
    both(lambda f: torch.vmap(torch.vmap(f, 1))(x))
    both(lambda f: torch.func.grad(sum_of(f))(x))
    both(lambda f: torch.vmap(torch.func.grad(sum_of(f)))(x))
    both(lambda f: torch.func.jvp(f, (x,), (x + 1,)))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        both(lambda f, t=transform: t(lambda x: f(x).sum((0, 1)))(x[:1]))
    for f in (lambda x: softmax(x, 0), lambda x: softmax(x[0], 0)):  # one dimension, and none, of each sample
        torch.testing.assert_close(torch.vmap(f)(x[0]), torch.stack([f(row) for row in x[0]]))
    with pytest.raises(NotImplementedError, match="forward mode in forward mode"):
        torch.func.jacfwd(torch.func.jacfwd(lambda x: ours(x, -1)))(x[0, 0])


def test_transforms_with_a_mask(backend, device) -> None:
    x, bias = random(4, 5, 6).to(device), random(4, 6, seed=1).to(device)

    def ours(x, bias):
        return scaled_masked_softmax(x, bias, 0.5, causal="bottom_right")

    def torchs(x, bias):
        return plain_chain(x, bias, 0.5, True)

    def both(transform):
        torch.testing.assert_close(transform(ours), transform(torchs), rtol=1e-4, atol=1e-5)

    both(lambda f: torch.vmap(f)(x, bias))
    both(lambda f: torch.vmap(f, (None, 0))(x[0], bias))
    both(lambda f: torch.vmap(f, (0, None))(x, bias[0]))
    both(lambda f: torch.vmap(torch.func.grad(lambda *t: f(*t).pow(2).sum(), (0, 1)))(x, bias))
    both(lambda f: torch.func.jvp(f, (x[0], bias[0]), (x[1], bias[1])))
    hidden = bias > 1
    torch.testing.assert_close(torch.vmap(ours)(x, hidden), torch.vmap(torchs)(x, hidden))
    tangents = torch.func.jvp(lambda x: ours(x, hidden[0]), (x[0],), (x[1],))
    torch.testing.assert_close(tangents, torch.func.jvp(lambda x: torchs(x, hidden[0]), (x[0],), (x[1],)))


def test_dropout_under_vmap(backend, device) -> None:
    """As PyTorch's: an error unless randomness is named; then the same for each sample, or one of its own."""
    x = torch.zeros(4, 3, 64, device=device)

    def f(x):
        return scaled_masked_softmax(x, dropout=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f)(x)
    same = torch.vmap(f, randomness="same")(x)
    assert torch.equal(same[0], same[1]) and 0 < (same > 0).double().mean() < 1
    different = torch.vmap(f, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    leaf = x.requires_grad_()
    torch.vmap(f, randomness="different")(leaf).pow(2).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
def test_compile_fullgraph(backend, device, compiler) -> None:
    torch._dynamo.reset()
    attention = memkern.nn.ScaledMaskedSoftmax(0.5, causal="bottom_right", inplace_backward=True)
    mask = (random(2, 1, 6, seed=3) > 1).to(device)

    def f(x, bias):
        y = attention(2 * x, mask) + attention(x, bias) + memkern.nn.Softmax(1)(x)
        return y + memkern.nn.LogSoftmax(-1)(x)

    inputs = [random(2, 5, 6).to(device).requires_grad_(), random(5, 6, seed=1).to(device).requires_grad_()]
    dy = random(2, 5, 6, seed=2).to(device)
    attention.inplace_backward = False
    expected = f(*inputs)
    attention.inplace_backward = True
    y = torch.compile(f, fullgraph=True, backend=compiler)(*inputs)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy))


@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
def test_compile_with_dropout(backend, device, compiler) -> None:
    torch._dynamo.reset()
    x = random(3, 64).to(device).requires_grad_()
    compiled = torch.compile(lambda x: scaled_masked_softmax(2 * x, dropout=0.5), fullgraph=True, backend=compiler)
    y = compiled(x)
    kept = y > 0
    assert not torch.equal(kept, compiled(x) > 0)
    expected = torch.softmax(2 * x, -1) * kept / 0.5
    torch.testing.assert_close(y, expected)
    dy = random(3, 64, seed=1).to(device)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))


def test_compile_with_inductor() -> None:
    """Its generated code before and after, once, on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("inductor: no C++ compiler here")
    torch._dynamo.reset()
    x, dy = random(2, 3, 5, 8)
    mask = random(5, 8, seed=1) > 1

    def f(x):
        return scaled_masked_softmax(2 * x, mask, 0.5, causal="bottom_right") * 3

    with memkern.backend("cpu" if memkern.backends.unavailable("cpu") is None else "reference"):
        found = value_and_gradient(torch.compile(f, fullgraph=True), x, dy)
        torch.testing.assert_close(found, value_and_gradient(f, x, dy))


def test_export(backend, device) -> None:
    x = random(3, 8).to(device)
    longer = torch.cat([x, -x])
    for layer in (memkern.nn.Softmax(-1), memkern.nn.LogSoftmax(0), memkern.nn.ScaledMaskedSoftmax(0.5)):
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        torch.testing.assert_close(program.module()(longer), layer(longer))


def test_no_data() -> None:
    """Meta and fake tensors."""
    x = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for f in (
        lambda x: softmax(x, 1, dtype=torch.float32),
        lambda x: scaled_masked_softmax(x, x > 0, 2.0, causal="bottom_right", dropout=0.5, inplace_backward=True),
    ):
        y = f(x)
        assert y.shape == x.shape and y.device.type == "meta"
        y.sum().backward()
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(3, 4, requires_grad=True)
        (scaled_masked_softmax(x, dropout=0.1, inplace_backward=True) * x.detach()).sum().backward()
        assert x.grad.shape == (3, 4)

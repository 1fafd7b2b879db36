"""The softmax functions on every backend, against PyTorch's own in fp64: arguments, masks, dropout, what is saved.

Derivatives and tracing are in test_softmax_transforms.py; modules, autocast and bad input in test_softmax_modules.py;
inplace_backward in test_softmax_inplace.py.
"""

from __future__ import annotations

import itertools
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import functional, memory
from memkern.functional import log_softmax, scaled_masked_softmax, softmax
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, dtypes_of
from tests.softmax_cases import INF, plain_chain, random, value_and_gradient

BOTH = pytest.mark.parametrize("name", ("softmax", "log_softmax"))


def assert_same(ours, torchs, x: Tensor, seed: int = 1) -> None:
    """Values and gradients against fp64 PyTorch."""
    y = ours(x)
    dy = random(*y.shape, seed=seed).to(y)
    y, dx = value_and_gradient(ours, x, dy)
    exact, exact_dx = value_and_gradient(torchs, x.double(), dy.double())
    assert y.shape == exact.shape and dx.shape == exact_dx.shape and dx.dtype == x.dtype
    eps = max(torch.finfo(y.dtype).eps, 2e-7)
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=eps / 4, equal_nan=True)
    eps = max(torch.finfo(dx.dtype).eps, eps)
    torch.testing.assert_close(dx.double(), exact_dx, rtol=4 * eps, atol=eps, equal_nan=True)


@BOTH
def test_like_torchs(backend, device, name) -> None:
    ours, torchs = getattr(functional, name), getattr(F, name)
    for shape, dtype in itertools.product(((), (1,), (5,), (3, 4), (2, 3, 4, 5)), dtypes_of(backend)):
        x = random(*shape).to(device, dtype)
        for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
            assert_same(lambda x, d=dim: ours(x, d), lambda x, d=dim: torchs(x, d), x)
    for shape in ((0,), (0, 5), (5, 0)):
        x = torch.empty(shape, device=device, requires_grad=True)
        y = ours(x, -1)
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


@BOTH
def test_without_a_dimension(name) -> None:
    """PyTorch's choice, its warning, and the line of the caller."""
    for shape in ((), (3,), (3, 4), (2, 3, 4), (2, 3, 4, 5)):
        x = torch.randn(shape)
        found = []
        for module in (functional, F):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                y = getattr(module, name)(x)
            found.append((y, str(caught[0].message), caught[0].filename, len(caught)))
        torch.testing.assert_close(found[0][0], found[1][0])
        assert found[0][1:] == found[1][1:] and found[0][2] == __file__


@BOTH
def test_dtype(backend, device, name) -> None:
    """pytorch#30572: 16-bit input, float32 output, a gradient in 16 bits; the cast comes first, as in PyTorch."""
    ours, torchs = getattr(functional, name), getattr(F, name)
    half, bfloat16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for given, wanted in ((half, fp32), (bfloat16, fp32), (fp32, half)):
        x = random(2, 3).to(device, given)
        dy = random(2, 3, seed=1).to(device, wanted)
        y, dx = value_and_gradient(lambda x, d=wanted: ours(x, 1, dtype=d), x, dy)
        expected, expected_dx = value_and_gradient(lambda x, d=wanted: torchs(x, 1, dtype=d), x, dy)
        assert y.dtype == wanted and dx.dtype == given
        eps = 2e-3 if half in (given, wanted) else 1e-2
        torch.testing.assert_close(y, expected, rtol=2e-6 if wanted == fp32 else eps, atol=1e-6)
        torch.testing.assert_close(dx, expected_dx, rtol=eps, atol=eps / 8)
    for kind in (torch.int64, torch.uint8, torch.bool):
        integers = torch.tensor([[1, 2, 5]], device=device).to(kind)
        torch.testing.assert_close(ours(integers, 1, dtype=fp32), torchs(integers, 1, dtype=fp32))


def test_dtype_reads_16_bits(backend, device) -> None:
    """No float32 copy of the input is made, and none is saved."""
    x = random(8, 64).to(device).half().requires_grad_()
    with memory.saved_for_backward() as saved:
        y = softmax(x, -1, dtype=torch.float32)
    assert saved.bytes == y.nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(backend, device, layout) -> None:
    """apex and TransformerEngine read strided scores as if they were contiguous."""
    base, other = random(2, 4, 3, 40, 40).to(device)
    x = laid_out(base, layout)
    assert_same(
        lambda x: scaled_masked_softmax(x, causal="square"), lambda x: plain_chain(x, causal=True), x
    )
    leaf = other.detach().requires_grad_()
    softmax(leaf, 1).backward(x)
    expected = other.double().requires_grad_()
    F.softmax(expected, 1).backward(x.double())
    torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", (None, "square", "bottom_right"))
def test_scaled_masked_softmax(backend, device, causal) -> None:
    keys = 12 if causal == "square" else 20
    masks = {
        "none": None,
        "padding": (random(2, 1, 1, keys, seed=2) > 0.8).to(device),
        "full": (random(2, 3, 12, keys, seed=3) > 1).to(device),
        "bias": random(3, 1, keys, seed=4).to(device),
    }
    masks["padding"][..., 0] = masks["full"][..., 0] = False  # which leaves a key to every query
    masks["half bias"] = masks["bias"].half()
    for dtype, mask in itertools.product(dtypes_of(backend), masks.values()):
        x = random(2, 3, 12, keys).to(device, dtype)
        scale = 0.3 if mask is None or mask.dtype == torch.bool else 1.0
        assert_same(
            lambda x, m=mask, s=scale: scaled_masked_softmax(x, m, s, causal=causal),
            lambda x, m=mask, s=scale: plain_chain(x, m, s, causal is not None),
            x,
        )


def test_the_scale_is_not_rounded_to_16_bits(backend, device) -> None:
    x = torch.tensor([[300.0, 200.0, 0.0]], device=device).bfloat16()
    y = scaled_masked_softmax(x, scale=0.1001, dtype=torch.float32)
    torch.testing.assert_close(y.double(), (x.double() * 0.1001).softmax(-1), rtol=1e-5, atol=0)


def test_fully_masked_rows(backend, device) -> None:
    """apex#1390: zeros and gradients of zero where asked, never a uniform row; other rows are unchanged."""
    mask = torch.zeros(4, 32, dtype=torch.bool, device=device)
    mask[0] = True
    for dtype, given in itertools.product(
        (torch.float16, torch.float32), (mask, torch.zeros(4, 32, device=device).masked_fill(mask, -INF))
    ):
        x, dy = random(2, 1, 1, 4, 32).to(device, dtype)
        zero, dx = value_and_gradient(lambda x, m=given: scaled_masked_softmax(x, m, fully_masked="zero"), x, dy)
        assert zero[..., 0, :].eq(0).all() and dx[..., 0, :].eq(0).all() and dx.isfinite().all()
        nan, _ = value_and_gradient(lambda x, m=given: scaled_masked_softmax(x, m), x, dy)
        assert nan[..., 0, :].isnan().all() and torch.equal(nan[..., 1:, :], zero[..., 1:, :])
    bottom = scaled_masked_softmax(torch.zeros(3, 1, device=device), causal="bottom_right", fully_masked="zero")
    assert bottom.flatten().tolist() == [0.0, 0.0, 1.0]
    both = scaled_masked_softmax(torch.zeros(3, 3, device=device), mask.new_tensor([1, 0, 0]), causal="square")
    assert both[0].isnan().all() and both[1:].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]]


def test_a_mask_that_requires_grad(backend, device) -> None:
    """A learned bias gets the gradient that the addition would give it."""
    for dtype, shape in itertools.product(dtypes_of(backend), ((3, 6, 6), (6,), (2, 1, 6, 1), (2, 3, 6, 6))):
        x, dy = random(2, 2, 3, 6, 6).to(device, dtype)
        bias = random(*shape, seed=5).to(device).requires_grad_()
        options = {"causal": "square", "scale": 0.5}
        leaf = x.requires_grad_()
        found = torch.autograd.grad(scaled_masked_softmax(leaf, bias, **options), (leaf, bias), dy)
        alone = torch.autograd.grad(scaled_masked_softmax(leaf.detach(), bias, **options), bias, dy)
        wide, wide_bias = leaf.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
        expected = torch.autograd.grad(plain_chain(wide, wide_bias, 0.5, True), (wide, wide_bias), dy.double())
        assert found[1].dtype == bias.dtype and torch.equal(alone[0], found[1])
        eps = max(torch.finfo(dtype).eps, 1e-6)
        for actual, value in zip(found, expected, strict=True):
            torch.testing.assert_close(actual.double(), value, rtol=8 * eps, atol=8 * eps)


def test_dropout(backend, device) -> None:
    """The gradient is that of the same elements; the seed is PyTorch's, drawn anew at each call."""
    x, dy = random(2, 3, 5, 64).to(device)
    kept = None
    for attempt in range(2):
        torch.manual_seed(3)
        first, dx = value_and_gradient(lambda x: scaled_masked_softmax(x, scale=0.5, dropout=0.25), x, dy)
        second = scaled_masked_softmax(x, scale=0.5, dropout=0.25)
        assert not torch.equal(first, second)
        assert attempt == 0 or torch.equal(first > 0, kept)
        kept = first > 0
        expected, expected_dx = value_and_gradient(
            lambda x, k=kept: plain_chain(x, scale=0.5) * k / 0.75, x.double(), dy.double()
        )
        torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-5, atol=1e-6)
    with memory.saved_for_backward() as saved:
        scaled_masked_softmax(x.requires_grad_(), dropout=0.25)
    assert saved.bytes == x.nbytes + 8


def test_checkpointing_draws_the_same_dropout_again(backend, device) -> None:
    x = random(3, 64).to(device).requires_grad_()

    def f(x):
        return scaled_masked_softmax(x, dropout=0.5).pow(2).sum()

    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(f(x), x)
    torch.manual_seed(1)
    (found,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False), x)
    torch.testing.assert_close(found, expected)


def test_saves_the_output_and_nothing_else(backend, device) -> None:
    """One tensor, which the next layer saves anyway; the input, scaled scores and masks are free to go."""
    x = random(2, 3, 8, 40).to(device, torch.bfloat16).requires_grad_()
    mask = (random(2, 1, 8, 40, seed=1) > 1).to(device)
    for f in (lambda x: softmax(x, 1), lambda x: log_softmax(x, -1), lambda x: scaled_masked_softmax(x, mask, 0.5)):
        with memory.saved_for_backward() as saved:
            y = f(x)
        assert (saved.bytes, saved.storages) == (y.nbytes, 1)
    with memory.saved_for_backward() as saved:
        torch.matmul(scaled_masked_softmax(x, mask, 0.5), x.detach().mT)
    assert saved.bytes == 2 * x.nbytes  # the probabilities once, and the other factor of the product
    for f in (lambda x: softmax(x, -1), lambda x: scaled_masked_softmax(x, mask, dropout=0.5, causal="bottom_right")):
        given = x * 1
        alive = weakref.ref(given)
        y = f(given)
        del given
        assert alive() is None and y.requires_grad


def test_backward_twice_and_the_gradient_untouched(backend, device) -> None:
    """apex#1430, #1587."""
    x, dy = random(2, 5, 33).to(device)
    x.requires_grad_()
    before = dy.clone()
    y = scaled_masked_softmax(x, scale=0.5, causal="bottom_right")
    y.backward(dy, retain_graph=True)
    once = x.grad.clone()
    y.backward(dy)
    assert torch.equal(x.grad, 2 * once) and torch.equal(dy, before)


def test_limits(backend, device) -> None:
    """pytorch#38839, #163932, and fp16's ends."""
    for dtype in HALVES:
        y = softmax(torch.tensor([65504.0, 65504.0, -65504.0], device=device, dtype=dtype), 0)
        assert y.tolist() == [0.5, 0.5, 0.0]
    far = torch.tensor([-1e7, -1e7 + 1], device=device)
    torch.testing.assert_close(log_softmax(far, 0).cpu(), torch.tensor([-1.3132617, -0.3132617]), rtol=1e-6, atol=0)
    assert softmax(torch.tensor([1e14, 0.0], device=device), 0).tolist() == [1.0, 0.0]

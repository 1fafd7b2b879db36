"""linear_cross_entropy against the plain chain, a linear layer and cross_entropy, in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memkern
from memkern.functional import cross_entropy, linear_cross_entropy
from memkern.functional import linear_cross_entropy_autograd as chunks
from tests.norm_cases import HALVES, dtypes_of, needs_fp64
from tests.test_cross_entropy import classes_of, random

ROWS, FEATURES, CLASSES = 13, 12, 31


def arguments(dtype: torch.dtype, device: str, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """hidden, weight and bias, which require gradients, and classes."""
    shapes = ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))[: 2 + bias]
    tensors = [random(*shape, seed=i).to(device, dtype).requires_grad_() for i, shape in enumerate(shapes)]
    target = classes_of(ROWS, CLASSES).to(device)
    target[3] = -100
    return tensors, target


def chain(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options) -> Tensor:
    options["weight"] = options.pop("class_weight", None)
    return cross_entropy(F.linear(hidden, weight, bias), target, **options)


def exact(tensors: list[Tensor], target: Tensor, **options) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of the plain chain in fp64, and its gradients."""
    wide = [t.detach().cpu().double().requires_grad_() for t in tensors]
    target = target.cpu().double() if target.is_floating_point() else target.cpu()
    options = {key: value.cpu().double() if isinstance(value, Tensor) else value for key, value in options.items()}
    with memkern.backend("reference"):
        loss = chain(*wide, *(None,) * (3 - len(wide)), target, **options)
    return loss.detach(), torch.autograd.grad(weighted(loss), wide)


def weighted(loss: Tensor) -> Tensor:
    """Their sum, each with a factor of its own."""
    return (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape)).sum()


def assert_close(actual: Tensor, value: Tensor, ulps: float, of: torch.dtype | None = None) -> None:
    """Within that many ulp of the largest value: what a matrix product of this dtype can promise."""
    assert actual.shape == value.shape
    error = (actual.detach().cpu().double() - value).abs().max() / value.abs().max()
    assert error <= ulps * torch.finfo(of or actual.dtype).eps, f"{error / torch.finfo(of or actual.dtype).eps:.2f} ulp"


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("chunk_tokens", (1, 5, 13, None))
def test_value_and_gradients(backend, device, chunk_tokens, reduction) -> None:
    """As exact as 16-bit logits are, which the plain chain makes too; the weight's gradient is summed in fp32."""
    for dtype, bias in itertools.product(dtypes_of(backend), (False, True)):
        tensors, target = arguments(dtype, device, bias)
        expected, gradients = exact(tensors, target, reduction=reduction)
        loss = linear_cross_entropy(*tensors[:2], target, *tensors[2:], reduction=reduction, chunk_tokens=chunk_tokens)
        found = torch.autograd.grad(weighted(loss), tensors)
        assert loss.dtype == dtype and loss.shape == expected.shape
        ulps = 4 if dtype in HALVES else 16
        assert_close(loss, expected, ulps)
        for tensor, actual, value in zip(tensors, found, gradients, strict=True):
            assert actual.dtype == tensor.dtype
            assert_close(actual, value, ulps)


def test_every_option(backend, device) -> None:
    class_weight = (0.5 + random(CLASSES, seed=4).abs()).to(device)
    q = random(ROWS, CLASSES, seed=5).softmax(1).to(device)
    for options in (
        {"class_weight": class_weight},
        {"ignore_index": 2},
        {"label_smoothing": 0.1, "class_weight": class_weight},
        {"z_loss": 0.1},
        {"softcap": 3.0},
        {"z_loss": 0.1, "softcap": 3.0, "label_smoothing": 0.1, "class_weight": class_weight},
    ):
        tensors, target = arguments(torch.float32, device)
        for targets in (target, q):
            if targets is q and "ignore_index" in options:
                continue
            targets = torch.where(target == -100, 2, target) if "ignore_index" in options else targets
            for reduction in ("none", "mean", "sum"):
                expected, gradients = exact(tensors, targets, reduction=reduction, **options)
                loss = linear_cross_entropy(
                    *tensors[:2], targets, tensors[2], reduction=reduction, chunk_tokens=5, **options
                )
                assert_close(loss, expected, 16)
                for actual, value in zip(torch.autograd.grad(weighted(loss), tensors), gradients, strict=True):
                    assert_close(actual, value, 16)


@pytest.mark.parametrize("shape", ((), (3,), (2, 3), (2, 0), (0,)), ids=str)
def test_shapes(backend, device, shape) -> None:
    hidden = random(*shape, FEATURES).to(device).requires_grad_()
    weight = random(CLASSES, FEATURES, seed=1).to(device).requires_grad_()
    count = hidden.numel() // FEATURES
    classes = classes_of(count, CLASSES).reshape(shape).to(device)
    q = random(*shape, CLASSES, seed=2).softmax(-1).to(device)
    for target, reduction in itertools.product((classes, q), ("none", "mean", "sum")):
        rows = target.reshape(-1) if target is classes else target.reshape(count, CLASSES)
        expected = F.cross_entropy(F.linear(hidden.reshape(count, FEATURES), weight), rows, reduction=reduction)
        expected = expected.reshape(shape) if reduction == "none" else expected
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_tokens=2)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        found, values = (torch.autograd.grad(x.sum(), (hidden, weight)) for x in (loss, expected))
        torch.testing.assert_close(found, values, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_strides(backend, device) -> None:
    """Transposed and expanded, as they are."""
    (hidden, weight, bias), target = arguments(torch.float32, device)
    for h, w in ((hidden.t().contiguous().t(), weight.t().contiguous().t()), (hidden[:1].expand(ROWS, -1), weight)):
        found = torch.autograd.grad(linear_cross_entropy(h, w, target, bias, chunk_tokens=5), (hidden, weight, bias))
        values = torch.autograd.grad(chain(h, w, bias, target), (hidden, weight, bias))
        torch.testing.assert_close(found, values)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weight_dtype", ("fp32", "16 bit"))
def test_under_autocast(backend, device, dtype, weight_dtype) -> None:
    """The logits in 16 bits, the loss and the weight's gradient in fp32, never rounded to 16 bits on its way."""
    of = torch.float32 if weight_dtype == "fp32" else dtype
    tensors, target = arguments(of, device)
    rounded = [t.detach().to(dtype) for t in tensors]
    for reduction in ("none", "mean"):
        expected, gradients = exact(rounded, target, reduction=reduction)
        with torch.autocast(device, dtype):
            loss = linear_cross_entropy(*tensors[:2], target, tensors[2], reduction=reduction, chunk_tokens=5)
        assert loss.dtype == torch.float32
        assert_close(loss, expected, 4, dtype)
        for tensor, actual, value in zip(tensors, torch.autograd.grad(weighted(loss), tensors), gradients, strict=True):
            assert actual.dtype == tensor.dtype
            assert_close(actual, value, 4, dtype)
        with torch.autocast(device, dtype):  # backward inside is the same
            loss = linear_cross_entropy(*tensors[:2], target, tensors[2], reduction=reduction, chunk_tokens=5)
            again = torch.autograd.grad(weighted(loss), tensors)
        for actual, value in zip(again, gradients, strict=True):
            assert_close(actual, value, 4, dtype)


def test_fp16_rows_that_overflow_leave_the_others_right(backend, device) -> None:
    """An ignored one and one that counts: no other row, nor its part of a scale, is any worse for them."""
    (hidden, weight, bias), target = arguments(torch.float16, device)
    with torch.no_grad():
        hidden[[3, 9]] *= 3e4
        weight[5] *= 1e3
    for options in ({"z_loss": 0.1}, {}):
        for reduction in ("none", "sum"):
            loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, **options)
            (found,) = torch.autograd.grad(loss.sum(), hidden)
            good = [i for i in range(ROWS) if i != 9]
            alone = linear_cross_entropy(hidden[good], weight, target[good], reduction="sum", **options)
            (expected,) = torch.autograd.grad(alone, hidden)
            assert found[9].isnan().all() and (found[3] == 0).all()
            torch.testing.assert_close(found[good], expected[good], rtol=2e-3, atol=2e-3)


def test_no_classes(backend, device) -> None:
    """Nor weights of them: nothing can count."""
    for dtype in dtypes_of(backend):
        hidden = torch.ones(3, 4, device=device, dtype=dtype).requires_grad_()
        weight, target = torch.ones(0, 4, device=device, dtype=dtype), torch.full((3,), -100, device=device)
        class_weight = torch.ones(0, device=device)
        loss = linear_cross_entropy(hidden, weight, target, class_weight=class_weight, reduction="sum")
        loss.backward()
        assert loss == 0 and (hidden.grad == 0).all()


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_fp16_neither_underflows_nor_overflows(backend, device, reduction) -> None:
    """8192 tokens' mean, and a loss scale that comes later: gradients of 1e-9 here, which fp16 has as 0, and sums of
    which a chunk passes 65504."""
    hidden = (30 + random(40, FEATURES)).to(device, torch.float16).requires_grad_()
    weight = (1e-2 * random(CLASSES, FEATURES, seed=1)).to(device, torch.float16).requires_grad_()
    target = torch.zeros(40, dtype=torch.long, device=device)
    scale = torch.full((40,), 2.0**-13, device=device)
    with torch.autocast(device, torch.float16):
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
    for factor in (2.0**-12, 1.0, 2.0**12):
        upstream = scale * factor if reduction == "none" else scale[0] * factor
        found = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=True)
        wide = [t.detach().cpu().double().requires_grad_() for t in (hidden, weight)]
        value = F.cross_entropy(F.linear(*wide), target.cpu(), reduction=reduction)
        values = torch.autograd.grad(value, wide, upstream.cpu().double())
        for actual, exactly in zip(found, values, strict=True):
            if exactly.abs().max() > 1e-4:  # else fp16 itself has few bits for the result
                assert_close(actual, exactly, 8)
            else:
                assert (actual.cpu().double() - exactly).abs().max() <= 2.0**-24


def test_no_gradient_that_is_not_asked_for(backend, device, monkeypatch) -> None:
    made = []
    zeros = chunks.Gradients.zeros.__func__
    monkeypatch.setattr(
        chunks.Gradients,
        "zeros",
        classmethod(lambda c, h, w, b, needs, d: made.append(needs) or zeros(c, h, w, b, needs, d)),
    )
    for wanted, reduction in itertools.product(((0,), (1,), (2,), (0, 2), (0, 1, 2)), ("mean", "none")):
        tensors, target = arguments(torch.float32, device)
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(i in wanted)
        loss = linear_cross_entropy(*tensors[:2], target, tensors[2], reduction=reduction, chunk_tokens=5)
        in_forward = made[-1]
        loss.sum().backward()
        expected = tuple(i in wanted for i in range(3))
        assert [t.grad is not None for t in tensors] == list(expected)
        assert made[-1] == expected and in_forward == (expected if reduction == "mean" else (False,) * 3)
    tensors, target = arguments(torch.float32, device)
    with torch.no_grad():
        linear_cross_entropy(*tensors[:2], target)
    linear_cross_entropy(*(t.detach() for t in tensors[:2]), target)
    assert made[-2:] == [(False,) * 3] * 2


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_a_second_backward_pass_is_right(backend, device, reduction) -> None:
    for dtype in dtypes_of(backend):
        tensors, target = arguments(dtype, device)
        loss = weighted(linear_cross_entropy(*tensors[:2], target, tensors[2], reduction=reduction, chunk_tokens=5))
        first = torch.autograd.grad(loss, tensors, retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(2 * loss, tensors, retain_graph=True)
        third = torch.autograd.grad(loss, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)), "the first is the caller's"
        for one, other, again in zip(kept, second, third, strict=True):
            assert_close(other, 2 * one.cpu().double(), 2)
            assert_close(again, one.cpu().double(), 2)


def test_a_hidden_that_is_changed_after_all_raises(backend, device) -> None:
    (hidden, weight, _), target = arguments(torch.float32, device)
    h = hidden * 1
    loss = linear_cross_entropy(h, weight, target)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_under_checkpointing(backend, device, reduction, reentrant) -> None:
    (hidden, weight, bias), target = arguments(torch.float32, device)

    def f(hidden):
        return weighted(linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk_tokens=5))

    expected = torch.autograd.grad(f(hidden), (hidden, weight, bias))
    checkpoint(f, hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close((hidden.grad, weight.grad, bias.grad), expected)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_derivatives_of_every_kind(backend, device, reduction) -> None:
    needs_fp64(backend)
    options = {"z_loss": 0.1, "softcap": 3.0, "chunk_tokens": 2, "reduction": reduction}
    given = [
        random(*shape, seed=i).double().to(device).requires_grad_() for i, shape in enumerate(((3, 2), (4, 2), (4,)))
    ]
    target = classes_of(3, 4).to(device)

    def f(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, target, bias, **options)

    # A first backward pass and the ones after it add up in another order.
    assert torch.autograd.gradcheck(f, given, check_forward_ad=True, check_batched_grad=True, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(f, given)
    q, class_weight = (t.double().to(device).requires_grad_() for t in (random(3, 4).softmax(1), 1 + random(4).abs()))

    def of_all(hidden, weight, q, class_weight):
        return linear_cross_entropy(hidden, weight, q, class_weight=class_weight, **options)

    assert torch.autograd.gradcheck(of_all, (*given[:2], q, class_weight))


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_batched_gradients(backend, device, reduction) -> None:
    """The Jacobian in one pass, which leaves the saved gradients for another; with the first backward pass behind."""
    tensors, target = arguments(torch.float32, device)

    def f(h, w, b):
        return linear_cross_entropy(h, w, target, b, reduction=reduction, chunk_tokens=5).reshape(-1)

    loss, plain = f(*tensors), chain(*tensors, target, reduction=reduction).reshape(-1)
    several = torch.eye(len(loss), device=device) if reduction == "none" else torch.tensor([[1.0], [2]], device=device)
    expected = torch.autograd.grad(plain, tensors, several, is_grads_batched=True, retain_graph=True)
    single = torch.autograd.grad(plain, tensors, several[1])
    for _ in range(2):
        found = torch.autograd.grad(loss, tensors, several, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, tensors, several[1], retain_graph=True), single)
    jacobian = torch.autograd.functional.jacobian(f, tuple(tensors), vectorize=True)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(f, tuple(tensors)))


def test_tied_weights_in_a_double_backward_pass(backend, device) -> None:
    """hidden is made of the weight: a gradient with respect to one is not to run through the other."""
    weight, target = random(4, 3, seed=1).to(device).requires_grad_(), classes_of(4, 4).to(device)
    results = []
    for f in (linear_cross_entropy, lambda h, w, t: cross_entropy(h @ w.t(), t)):
        (gradient,) = torch.autograd.grad(f(weight.tanh(), weight, target), weight, create_graph=True)
        results.append((gradient, *torch.autograd.grad(gradient.square().sum(), weight)))
    torch.testing.assert_close(*results)


def test_function_transforms(backend, device) -> None:
    hidden, weight = random(5, 3, 8).to(device), random(6, 8, seed=1).to(device)
    target, weights = classes_of(15, 6).reshape(5, 3).to(device), random(5, 6, 8, seed=2).to(device)

    def both(transform):
        ours = transform(lambda h, w, t: linear_cross_entropy(h, w, t, chunk_tokens=2))
        plain = transform(lambda h, w, t: F.cross_entropy(F.linear(h, w), t))
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)

    both(lambda f: torch.vmap(f, (0, None, 0))(hidden, weight, target))
    both(lambda f: torch.vmap(f)(hidden, weights, target))
    both(lambda f: torch.func.grad(f, (0, 1))(hidden[0], weight, target[0]))
    both(lambda f: torch.vmap(torch.func.grad(f, (0, 1)), (0, None, 0))(hidden, weight, target))
    both(lambda f: torch.func.jvp(lambda h, w: f(h, w, target[0]), (hidden[0], weight), (hidden[1], weight)))


def test_no_data() -> None:
    """Meta and fake tensors."""
    target = torch.empty(9, dtype=torch.long, device="meta")
    hidden, weight, bias = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((9, 4), (6, 4), (6,)))
    linear_cross_entropy(hidden, weight, target, bias, chunk_tokens=4).backward()
    assert hidden.grad.shape == (9, 4) and weight.grad.shape == (6, 4) and bias.grad.shape == (6,)
    with torch._subclasses.FakeTensorMode():
        hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
        linear_cross_entropy(hidden, weight, torch.randint(6, (9,)), reduction="none").sum().backward()
        assert weight.grad.shape == (6, 4)


def test_products_on_a_gpu_are_fp32() -> None:
    """Their dtypes and shapes, on the stand-ins for CUDA tensors that PyTorch has without one."""
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    for dtype in HALVES:
        with torch._subclasses.FakeTensorMode(), memkern.backend("reference"), hooks:
            hidden, weight = (torch.empty(n, 4, device="cuda", dtype=dtype, requires_grad=True) for n in (9, 6))
            linear_cross_entropy(hidden, weight, torch.zeros(9, dtype=torch.long, device="cuda"), chunk_tokens=4)
        shapes = [(tuple(t.shape), t.dtype) for t in saved]
        assert ((9, 4), torch.float32 if dtype == torch.float16 else dtype) in shapes[2:]
        assert ((6, 4), torch.float32) in shapes
        saved.clear()


def test_nothing_counts(backend, device) -> None:
    """As PyTorch: a mean of NaN, whose gradients are 0."""
    tensors, target = arguments(torch.float32, device)
    for options in ({}, {"class_weight": torch.ones(CLASSES, device=device)}):
        loss = linear_cross_entropy(*tensors[:2], torch.full_like(target, -100), tensors[2], **options)
        assert loss.isnan() and all((g == 0).all() for g in torch.autograd.grad(loss, tensors))

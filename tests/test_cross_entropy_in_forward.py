"""cross_entropy with its gradient made in the forward pass, and written over the logits: right, or an error."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memkern import memory
from memkern.functional import cross_entropy
from memkern.functional.cross_entropy_autograd import CrossEntropy, headroom
from tests.norm_cases import HALVES, dtypes_of
from tests.test_cross_entropy import classes_of, random
from tests.test_cross_entropy_layers import OPTIONS, a_target, gradients
from tests.ulp import spacing

BOTH = pytest.mark.parametrize("overwrite", (False, True))


@BOTH
@pytest.mark.parametrize("kind", ("classes", "probabilities"))
def test_the_same_loss_and_gradient(backend, device, kind, overwrite) -> None:
    """Rounded once more, when the incoming gradient is known."""
    for dtype, shape in ((dtype, shape) for dtype in dtypes_of(backend) for shape in ((7,), (5, 40))):
        x = random(*shape).to(device, dtype).requires_grad_()
        target, weight = a_target(kind, shape).to(device), 0.5 + random(shape[-1], seed=2).abs().to(device)
        weight = None if dtype == torch.float64 else weight
        for reduction in ("none", "mean", "sum"):
            options = {"reduction": reduction, "weight": weight, **OPTIONS}
            expected = cross_entropy(x, target, **options)
            (exact,) = gradients(expected, x)
            loss = cross_entropy(x * 1, target, grad_in_forward=True, overwrite_logits=overwrite, **options)
            (found,) = gradients(loss, x)
            assert torch.equal(loss, expected) and found.dtype == dtype
            ulp = spacing(exact.cpu().double(), dtype)
            assert ((found.cpu().double() - exact.cpu().double()).abs() <= 2 * ulp).all()


def test_what_is_saved_and_where(backend, device) -> None:
    x = random(6, 100).to(device, torch.float16).requires_grad_()
    logits, target = x * 1, classes_of(6, 100).to(device)
    with memory.saved_for_backward() as saved:
        cross_entropy(logits, target, reduction="sum", grad_in_forward=True)
    assert saved.bytes == logits.nbytes + 4 * 6  # the gradient, and a factor a row
    before = logits.detach().clone()
    cross_entropy(logits, target, grad_in_forward=True)
    assert torch.equal(logits, before)
    loss = cross_entropy(logits, target, grad_in_forward=True, overwrite_logits=True)
    assert not torch.equal(logits, before)
    place = logits.data_ptr()
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    seen: list[int] = []
    loss.backward()
    assert seen == [place]  # nothing of the size of the logits was made


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_loss_scale_that_comes_later_finds_the_small_probabilities(backend, device, dtype) -> None:
    """In fp16, p of 2e-8 to 6e-5 are 0 or subnormal, and 65536 times as much after the scale."""
    logits = torch.full((2, 64), -14.0, device=device, dtype=dtype)
    logits[:, 0] = 2.0
    logits[:, 1:8] = -5.0
    x, target = logits.requires_grad_(), torch.tensor([0, 1], device=device)
    scale = 65536.0
    wide = x.detach().cpu().double().requires_grad_()
    (exact,) = torch.autograd.grad(scale * torch.nn.functional.cross_entropy(wide, target.cpu()), wide)
    with torch.autocast(device, dtype):
        (found,) = torch.autograd.grad(scale * cross_entropy(x, target, grad_in_forward=True), x)
    assert ((found.cpu().double() - exact).abs() <= spacing(exact, dtype) + scale * 1e-6 * wide.softmax(1)).all()
    assert (found != 0).all()


def test_headroom(backend, device) -> None:
    """A power of two, whatever the weights and the z-loss: no gradient overflows in fp16."""
    bounds = torch.tensor([1.0, 0.5, 3.7, 1e-6, 4e4, 1e30], device=device)
    scale = headroom(bounds)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((bounds * scale > 2**13 - 1) & (bounds * scale <= 2**14)).all()
    with_others = torch.cat([bounds, torch.tensor([torch.nan, torch.inf, 0.0, 1e-42], device=device)])
    assert headroom(with_others).isfinite().all() and headroom(with_others).amin() == scale.amin()
    x, target = (50 * random(4, 30)).to(device, torch.float16).requires_grad_(), classes_of(4, 30).to(device)
    weight = 1e4 * (0.5 + random(30, seed=2).abs()).to(device)
    for q in (target, 40 * random(4, 30, seed=1).softmax(1).to(device)):
        options = {"weight": weight, "z_loss": 2.0, "reduction": "none"}
        rows = 1e-6 * torch.ones(4, device=device)
        with torch.autocast(device, torch.float16):
            expected = torch.autograd.grad(cross_entropy(x, q, **options), x, rows)[0]
            found = torch.autograd.grad(cross_entropy(x, q, grad_in_forward=True, **options), x, rows)[0]
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-7)
    plan = CrossEntropy(-100, 0.0, 0.0, 0.0, backend)
    for lse in (torch.ones(4, device=device), torch.full((4,), torch.nan, device=device)):
        assert plan.bound(target, None, lse).tolist() == [1.0] * 4


@BOTH
def test_batched_gradients(backend, device, overwrite) -> None:
    """Each as if it were alone; the one pass that there may be is still to come."""
    for dtype in dtypes_of(backend):
        x, target = random(4, 6).to(device, dtype).requires_grad_(), classes_of(4, 6).to(device)
        options = {"grad_in_forward": True, "overwrite_logits": overwrite, "reduction": "none"}
        several, logits = torch.eye(4, device=device, dtype=dtype), x * 1
        (expected,) = torch.autograd.grad(cross_entropy(x, target, reduction="none"), x, several, is_grads_batched=True)
        loss = cross_entropy(logits, target, **options)
        (found,) = torch.autograd.grad(loss, x, several, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        torch.testing.assert_close(torch.autograd.grad(loss, x, several[2])[0], found[2])


def test_no_classes(backend, device) -> None:
    for dtype in dtypes_of(backend):
        x, ignored = torch.ones(3, 0, device=device, dtype=dtype).requires_grad_(), torch.full((3,), -100).to(device)
        options = {"weight": torch.ones(0, device=device), "grad_in_forward": True}
        loss = cross_entropy(x, ignored, reduction="sum", **options)
        loss.backward()
        assert loss == 0 and x.grad.shape == (3, 0)


def test_torch_func_is_refused(backend, device) -> None:
    x, target = random(2, 3, 5).to(device), classes_of(3, 5).to(device)
    gradient = torch.func.grad(lambda x: cross_entropy(x, target, grad_in_forward=True))
    for call in (lambda: gradient(x[0]), lambda: torch.vmap(gradient)(x)):
        with pytest.raises(RuntimeError, match="grad_in_forward: got True under torch.func"):
            call()


@BOTH
def test_a_second_backward_pass_raises(backend, device, overwrite) -> None:
    x, target = random(3, 5).to(device).requires_grad_(), classes_of(3, 5).to(device)
    loss = cross_entropy(x * 1, target, grad_in_forward=True, overwrite_logits=overwrite)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    with pytest.raises(RuntimeError, match="cross_entropy: a second backward pass through grad_in_forward=True"):
        loss.backward()
    assert torch.equal(x.grad, first)
    loss = cross_entropy(x * 1, target, grad_in_forward=True, overwrite_logits=overwrite)
    with pytest.raises(RuntimeError, match="cross_entropy: got create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: cross_entropy(x * 1, target, grad_in_forward=True, overwrite_logits=overwrite))(x)


def test_a_backward_pass_that_needs_the_logits_raises(backend, device) -> None:
    """Liger#272: what else saved them is not to compute with a gradient in their place."""
    x, target = random(3, 5).to(device).requires_grad_(), classes_of(3, 5).to(device)
    logits = torch.tanh(x)  # saves its output
    loss = cross_entropy(logits, target, grad_in_forward=True, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = x * 1
    other = logits.square().sum()
    cross_entropy(logits, target, grad_in_forward=True, overwrite_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    view = (x * 1).view(3, 5)  # of logits that nothing else needs: shares their memory, and is overwritten with them
    cross_entropy(view, target, grad_in_forward=True, overwrite_logits=True).backward()


def test_refuses_to_overwrite(backend, device) -> None:
    x, target = random(3, 5).to(device).requires_grad_(), classes_of(3, 5).to(device)
    options = {"grad_in_forward": True, "overwrite_logits": True}
    for leaf in (x, x[:2], x.view(3, 5)):
        with pytest.raises(ValueError, match="overwrite_logits: got input that is a leaf"):
            cross_entropy(leaf, target[: len(leaf)], **options)
    y = x.flatten() * 1
    for shared in (y[:5].expand(3, 5), y[:3, None].expand(3, 5), *(y.as_strided((3, 5), s) for s in ((1, 1), (4, 1)))):
        with pytest.raises(ValueError, match="overwrite_logits: got input of strides"):
            cross_entropy(shared, target, **options)
    for rows, strides in ((2, (1, 3)), (3, (5, 1)), (1, (1, 1))):
        cross_entropy((x.flatten() * 1).as_strided((rows, 5), strides), target[:rows], **options)
    with pytest.raises(ValueError, match=r"overwrite_logits: got input of shape \(3, 5, 1\)"):
        cross_entropy(x[..., None] * 1, target[:, None], **options)
    with pytest.raises(ValueError, match="overwrite_logits: needs grad_in_forward=True"):
        cross_entropy(x * 1, target, overwrite_logits=True)


def test_no_effect_where_nothing_needs_a_gradient(backend, device) -> None:
    x, target = random(3, 5).to(device), classes_of(3, 5).to(device)
    options = {"grad_in_forward": True, "overwrite_logits": True}
    before = x.clone()
    cross_entropy(x, target, **options)
    with torch.no_grad():
        cross_entropy(x.clone().requires_grad_() * 1, target, **options)
    assert torch.equal(x, before)
    logits = x.requires_grad_() * 1
    q = random(3, 5, seed=1).softmax(1).to(device).requires_grad_()
    cross_entropy(logits, q, **options).backward()  # the gradient of the probabilities needs the logits
    assert torch.equal(logits, before) and q.grad is not None


@pytest.mark.parametrize("reentrant", (False, True))
@BOTH
def test_under_checkpointing(backend, device, overwrite, reentrant) -> None:
    x, target = random(4, 6).to(device).requires_grad_(), classes_of(4, 7).to(device)
    weight = random(7, 6, seed=1).to(device).requires_grad_()

    def f(x, **options):
        return cross_entropy(x @ weight.t(), target, **options)

    expected = torch.autograd.grad(f(x), (x, weight))
    options = {"grad_in_forward": True, "overwrite_logits": overwrite}
    checkpoint(lambda x: f(x, **options), x, use_reentrant=reentrant).backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


def test_strided_logits(backend, device) -> None:
    """Overwritten where they lie; the gaps stay."""
    buffer = random(3, 9).to(device)
    gaps = buffer[:, 5:].clone()
    x, target = buffer[:, :5].clone().requires_grad_(), classes_of(3, 5).to(device)
    (expected,) = torch.autograd.grad(cross_entropy(x, target), x)
    base = torch.zeros(3, 9, device=device).requires_grad_()
    logits = (base + buffer)[:, :5]
    cross_entropy(logits, target, grad_in_forward=True, overwrite_logits=True).backward()
    torch.testing.assert_close(base.grad[:, :5], expected)
    assert (base.grad[:, 5:] == 0).all() and torch.equal(buffer[:, 5:], gaps)

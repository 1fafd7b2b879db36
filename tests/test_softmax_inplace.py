"""inplace_backward: where the gradient is overwritten, where it is copied, and where that raises."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import memkern
from memkern.functional import scaled_masked_softmax
from memkern.functional.reuse import alone
from tests.softmax_cases import random

HELD = "inplace_backward: the gradient of the output is held elsewhere"


def ours(x: Tensor, inplace: bool = True, **options) -> Tensor:
    return scaled_masked_softmax(x, scale=0.5, inplace_backward=inplace, **options)


def places(y: Tensor, x: Tensor) -> list[int]:
    """Filled in by backward: where the gradient of y lay, and where that of the (non-leaf) x lies."""
    found = []
    y.register_hook(lambda g: found.append(g.data_ptr()))
    x.register_hook(lambda g: found.append(g.data_ptr()))
    return found


CONSUMERS = {
    "product": lambda y, w: y * w,
    "matmul": lambda y, w: y @ w.mT,  # of 4-D tensors: the gradient is a view
    "view": lambda y, w: y.view(-1, 8) * w.view(-1, 8),
    "reshaped twice": lambda y, w: y.view(-1).view(2, -1) * w.view(2, -1),
    "two consumers": lambda y, w: y * w + y.exp(),
    "the same one twice": lambda y, w: (y + y) * w,
    "a sum with a leaf": lambda y, w: (y + w.clone().requires_grad_()) * w,
    "another dtype": lambda y, w: y.half() * w.half(),
}


@pytest.mark.parametrize("dropout", (0.0, 0.5))
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_gradient_is_overwritten(backend, device, consumer, dropout) -> None:
    x, w = random(2, 2, 3, 8, 8).to(device)
    results = []
    for inplace in (False, True):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        scores = leaf * 1
        y = ours(scores, inplace, dropout=dropout)
        where = places(y, scores)
        CONSUMERS[consumer](y, w).square().sum().backward()
        assert (where[0] == where[1]) == inplace
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1])


def test_retained_graph(backend, device) -> None:
    """Each pass has a gradient of its own; y is not what is overwritten."""
    x, w = random(2, 3, 8).to(device)
    x.requires_grad_()
    z = (ours(x) * w).sum()
    z.backward(retain_graph=True)
    once = x.grad.clone()
    z.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    (expected,) = torch.autograd.grad((ours(x, inplace=False) * w).sum(), x)
    torch.testing.assert_close(once, expected)


def raises(call) -> None:
    with pytest.raises(RuntimeError, match=HELD):
        call()


def test_a_gradient_that_is_held_raises_and_is_left_alone(backend, device) -> None:
    x, dy = random(2, 3, 8).to(device)
    x.requires_grad_()
    before = dy.clone()
    y = ours(x)
    raises(lambda: y.backward(dy, retain_graph=True))
    raises(lambda: y.backward(dy.view(3, 8), retain_graph=True))
    raises(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
    raises(lambda: y.view(24).backward(dy.view(24), retain_graph=True))
    assert torch.equal(dy, before)

    held = []
    y = ours(x)
    y.register_hook(held.append)
    raises(lambda: (y * dy).sum().backward())
    assert torch.equal(held[0], dy)

    for keep in (lambda g: g.view(-1), lambda g: g.detach(), lambda g: g[1:], lambda g: g.untyped_storage()):
        y = ours(x)
        y.register_hook(lambda g, keep=keep: held.append(keep(g)))
        raises(lambda y=y: (y * dy).sum().backward())
    y = ours(x)
    raises(lambda: torch.autograd.grad((y * dy).sum(), [y, x]))
    assert x.grad is None


def test_a_gradient_shared_with_another_consumer_raises(backend, device) -> None:
    """An addition passes one gradient on to both sides; the other one is still to be used."""
    x, w = random(2, 3, 8).to(device)
    x.requires_grad_()
    other = w.clone().requires_grad_()
    for meet in (lambda e, y: e + y, lambda e, y: e.view(-1) + y.view(-1)):
        waiting = other.exp()  # older than y, so that its backward runs later
        y = ours(x)
        raises(lambda y=y, e=waiting, meet=meet: meet(e, y).square().sum().backward())
    # Not shared any more where the other side has gone first.
    y = ours(x)
    late = other.exp()
    (y + late).square().sum().backward()
    (expected,) = torch.autograd.grad((ours(x, inplace=False) + late.detach()).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


def in_place(x: Tensor, w: Tensor) -> bool:
    """Whether a backward pass that nothing else looks into overwrites the gradient."""
    scores = x.detach().requires_grad_() * 1
    y = ours(scores)
    where = places(y, scores)
    (y * w).sum().backward()
    return where[0] == where[1]


class Keeps(torch.utils._python_dispatch.TorchDispatchMode):
    """Holds whatever passes by."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.kept = [*getattr(self, "kept", ()), (args, result)]
        return result


def test_who_looks_on_at_the_first_call_does_not_matter_later(backend, device) -> None:
    """What nothing else holds is measured then: a debugger, which holds the locals it reads, made it one more."""
    x, w = random(2, 3, 8).to(device)

    def debugger(frame, event, argument):
        assert frame.f_locals is not None
        return debugger

    alone.cache_clear()
    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        assert not in_place(x, w)
    finally:
        sys.settrace(before)
    assert in_place(x, w) or before
    alone.cache_clear()
    with Keeps():
        raises(lambda: in_place(x, w))
    assert in_place(x, w) or before


def test_looking_at_a_gradient_is_not_holding_it(backend, device) -> None:
    x, w = random(2, 3, 8).to(device)
    y = ours(x.requires_grad_())
    y.register_hook(lambda g: (g.untyped_storage().nbytes(), g.view(-1), None)[2])
    (y * w).sum().backward()
    with torch.autograd.detect_anomaly(check_nan=False):
        assert in_place(x, w)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(lambda x: ours(x) * w, x, use_reentrant=reentrant).sum().backward()


def test_batched_gradients_are_not_overwritten(backend, device) -> None:
    x, *w = random(3, 3, 8).to(device)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(ours(x), x, torch.stack(w), is_grads_batched=True)
    for i in range(2):
        torch.testing.assert_close(dx[i], torch.autograd.grad(ours(x, inplace=False), x, w[i])[0])


def test_a_full_backward_hook_holds_the_gradient(backend, device) -> None:
    layer = memkern.nn.ScaledMaskedSoftmax(inplace_backward=True)
    layer.register_full_backward_hook(lambda *arguments: None)
    raises(lambda: layer(random(3, 8).to(device).requires_grad_() * 1).square().sum().backward())


def test_create_graph_raises(backend, device) -> None:
    x, w = random(2, 3, 8).to(device)
    x.requires_grad_()
    y = ours(x)
    with pytest.raises(RuntimeError, match="inplace_backward: got create_graph=True"):
        torch.autograd.grad((y * w).sum(), x, create_graph=True)


def test_what_cannot_be_overwritten_is_copied(backend, device) -> None:
    """An expanded or strided gradient, or one of another dtype; dx is as ever."""
    for out in (None, torch.float32):
        dtype = torch.float32 if out is None else torch.float16
        x = random(3, 8).to(device, dtype).requires_grad_()
        wide = torch.ones(3, 16, device=device)[:, ::2]
        for dy in (torch.ones((), device=device).expand(3, 8), torch.ones(8, 3, device=device).t(), wide):
            before = dy.clone()
            (dx,) = torch.autograd.grad(ours(x, dtype=out), x, dy)
            (expected,) = torch.autograd.grad(ours(x, inplace=False, dtype=out), x, dy)
            assert torch.equal(dx, expected) and dx.dtype == dtype and torch.equal(dy, before)
    x = random(3, 8).to(device).half().requires_grad_()
    dy = random(3, 8, seed=1).to(device)
    before = dy.clone()
    ours(x, dtype=torch.float32).backward(dy)  # held by the caller, and left alone, as dx is in 16 bits
    assert torch.equal(dy, before)


def test_the_mask_gets_its_gradient_first(backend, device) -> None:
    x, w = random(2, 3, 8).to(device)
    bias = random(8, seed=2).to(device)
    found = []
    for inplace in (False, True):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        y = scaled_masked_softmax(*leaves, 0.5, inplace_backward=inplace)
        (y * w).sum().backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[0], found[1])
    assert found[1][1].abs().sum() > 0
    before = w.clone()
    alone = bias.clone().requires_grad_()
    scaled_masked_softmax(x, alone, 0.5, inplace_backward=True).backward(w)  # no gradient to put over w
    torch.testing.assert_close(alone.grad, found[0][1])
    assert torch.equal(w, before)


def test_the_version_counter_sees_it(backend, device) -> None:
    x, w = random(2, 3, 8).to(device)
    scores = x.requires_grad_() * 1
    y = ours(scores)
    versions = []
    y.register_hook(lambda g: versions.append(g._version))
    scores.register_hook(lambda g: versions.append(g._version))
    (y * w).sum().backward()
    assert versions[1] > versions[0]


def test_function_transforms_never_overwrite(backend, device) -> None:
    x, w = random(2, 3, 8).to(device)
    before = w.clone()
    expected = torch.func.vjp(lambda x: ours(x, inplace=False), x)[1](w)[0]
    assert torch.equal(torch.func.vjp(ours, x)[1](w)[0], expected) and torch.equal(w, before)
    per_sample = torch.vmap(torch.func.grad(lambda x, w: (ours(x) * w).sum()))(x, w)
    torch.testing.assert_close(per_sample, expected)


def test_a_training_step_of_attention(backend, device) -> None:
    """What it is made for: scores from a product, probabilities into one."""
    q, k, v = random(3, 2, 2, 6, 16).to(device)
    grads = []
    for inplace in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT
        out = scaled_masked_softmax(scores, scale=0.25, causal="square", inplace_backward=inplace) @ leaves[2]
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1])

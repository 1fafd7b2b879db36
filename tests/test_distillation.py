"""The ops of distillation on every backend, against PyTorch in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import memkern
from memkern import ops
from memkern.functional import distillation_loss
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, dtypes_of
from tests.test_cross_entropy import random
from tests.ulp import spacing


def exact_distillation(dloss, logits, teacher, temperature):
    logits = logits.detach().cpu().double().requires_grad_()
    log_p = F.log_softmax(logits / temperature, 1)
    log_t = F.log_softmax(teacher.cpu().double() / temperature, 1)
    loss = F.kl_div(log_p, log_t, reduction="none", log_target=True).sum(1)
    (gradient,) = torch.autograd.grad(loss, logits, dloss.cpu().double())
    return loss.detach(), gradient, (log_p.exp() + log_t.exp()).detach()


@pytest.mark.parametrize("temperature", (1.0, *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (2.5, 0.5))))
def test_distillation(backend, device, temperature) -> None:
    for dtype, width in itertools.product(dtypes_of(backend), (1, 2, 7, 64, 1025, 4096, 50_257)):
        logits, teacher = (2 * random(2, 3, width)).to(device, dtype)
        loss, lse, teacher_lse = ops.op(backend, "distillation_forward")(logits, teacher, temperature)
        assert loss.dtype == lse.dtype == teacher_lse.dtype == ops.computed_in(logits)
        dloss = random(3, seed=1).to(loss)
        dlogits = ops.op(backend, "distillation_backward")(dloss, logits, lse, teacher, teacher_lse, temperature)
        expected, gradient, p = exact_distillation(dloss, logits, teacher, temperature)
        eps, scale = torch.finfo(loss.dtype).eps, float(logits.abs().max() + teacher.abs().max()) / temperature
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=16 * eps, atol=16 * eps * (1 + scale))
        torch.testing.assert_close(
            lse.cpu().double(), torch.logsumexp(logits.cpu().double() / temperature, 1), rtol=8 * eps, atol=8 * eps
        )
        allowed = (1 if dtype in HALVES else 4) * spacing(gradient, dtype)
        allowed = allowed + 4 * eps * (1 + scale) * p * dloss.cpu().double().abs()[:, None] / temperature
        error = (dlogits.cpu().double() - gradient).abs()
        assert (error <= allowed).all(), f"dlogits: {(error / allowed).max():.2f} of what is allowed at {width}"


def assert_as_exact(loss, logits, teacher, temperature):
    """Not below 0, and off by no more than what the rounding of the differences and of the log-sum-exps leaves."""
    rows = [t.cpu().double() / temperature for t in (logits, teacher)]
    p, q = (F.log_softmax(t, 1) for t in rows)
    expected = (q.exp() * (torch.expm1(p - q) - (p - q))).sum(1)
    eps, apart = torch.finfo(loss.dtype).eps, (rows[0] - rows[1]).abs().amax(1)
    apart = apart + (16 if loss.dtype == torch.float64 else 0)  # what it is compared with is as inexact
    allowed = 16 * eps * expected + 4 * eps * apart * expected.sqrt() + (16 * eps * (1 + apart)) ** 2
    assert (loss >= 0).all()
    error = (loss.cpu().double() - expected).abs() / allowed
    assert error.max() <= 1, f"{error.max():.2f} of what is allowed"


@pytest.mark.parametrize("noise", (0.0, 1e-6, 1e-5, 1e-4, 1e-2, 0.3, 0.7))
def test_nearly_equal_logits(backend, device, noise) -> None:
    """Where log q - log p cancels; also beside a constant, which changes nothing, and classes that are ruled out."""
    for rows, width, offset in ((40, 7, 0.0), (20, 500, 3.0), (2, 5000, 0.0), (1, 50_257, -5.0)):
        teacher = 3 * random(rows, width)
        logits = teacher + noise * random(rows, width, seed=1) + offset
        assert_as_exact(
            ops.op(backend, "distillation_forward")(logits.to(device), teacher.to(device), 1.0)[0], logits, teacher, 1.0
        )
    logits[:, ::3] = teacher[:, ::3] = -torch.inf
    kept = [i for i in range(width) if i % 3]
    loss = ops.op(backend, "distillation_forward")(logits.to(device), teacher.to(device), 1.0)[0]
    assert_as_exact(loss, logits[:, kept], teacher[:, kept], 1.0)


@pytest.mark.parametrize("temperature", (30.0, 1e4))
def test_high_temperatures(backend, device, temperature) -> None:
    """Which bring all logits close; two rows in three of a block are not."""
    for dtype, width in itertools.product(dtypes_of(backend), (7, 1000, 5000)):
        logits, teacher = (3 * random(2, 6, width)).to(device, dtype)
        logits[::3, 0] = min(60 * temperature, 6e4)
        loss = ops.op(backend, "distillation_forward")(logits, teacher, temperature)[0]
        assert_as_exact(loss, logits, teacher, temperature)


def test_a_small_loss_reaches_the_user(backend, device) -> None:
    """temperature^2 times it, at 1e4: PyTorch in fp32 is off by a fifth."""
    student, teacher = (random(2, 8, 2000) * 4).to(device).unbind()
    with memkern.backend("reference"):
        expected = distillation_loss(student.double().cpu(), teacher.double().cpu(), 1e4)
    torch.testing.assert_close(distillation_loss(student, teacher, 1e4).cpu().double(), expected, rtol=1e-4, atol=0)


def test_distillation_of_logits_that_are_infinite(backend, device) -> None:
    """Classes that the teacher rules out add nothing; those that the student alone rules out cost infinity."""
    logits, teacher = random(2, 4, 9).to(device)
    teacher[0, 3:] = -torch.inf
    logits[0, 5:] = -torch.inf
    logits[1, 2] = -torch.inf
    teacher[2, 1], logits[3, 1] = torch.nan, torch.inf
    loss, lse, teacher_lse = ops.op(backend, "distillation_forward")(logits, teacher, 1.0)
    assert loss[0].isfinite() and loss[1] == torch.inf and loss[2:].isnan().all()
    expected = F.kl_div(logits[:1].log_softmax(1)[:, :3], teacher[:1, :3].softmax(1), reduction="sum")
    torch.testing.assert_close(loss[0], expected)
    dlogits = ops.op(backend, "distillation_backward")(torch.ones_like(loss), logits, lse, teacher, teacher_lse, 1.0)
    torch.testing.assert_close(dlogits[:2], logits[:2].softmax(1) - teacher[:2].softmax(1))
    assert dlogits[2:].isnan().all()


def test_distillation_layouts(backend, device) -> None:
    for layout, shape in itertools.product(LAYOUTS, ((6, 5), (6, 64), (0, 5))):
        if layout == "channels last":
            continue
        logits, teacher = (laid_out(t, layout) for t in random(2, *shape).to(device, torch.float16))
        dloss = laid_out(random(shape[0]).to(device), layout)
        results = []
        for x, t, d in ((logits, teacher, dloss), tuple(t.contiguous() for t in (logits, teacher, dloss))):
            loss, *both = ops.op(backend, "distillation_forward")(x, t, 2.0)
            results.append((loss, ops.op(backend, "distillation_backward")(d, x, both[0], t, both[1], 2.0)))
        for actual, value in zip(*results, strict=True):
            torch.testing.assert_close(actual, value, rtol=2e-3, atol=2e-4)


@pytest.mark.exhaustive
def test_opcheck(backend, device) -> None:
    logits, teacher = random(2, 3, 16).to(device)
    torch.library.opcheck(ops.op(backend, "distillation_forward"), (logits, teacher, 2.0))
    loss, lse, teacher_lse = ops.op(backend, "distillation_forward")(logits, teacher, 2.0)
    torch.library.opcheck(ops.op(backend, "distillation_backward"), (loss, logits, lse, teacher, teacher_lse, 2.0))


def test_bad_arguments(backend, device) -> None:
    if backend not in ("cpu", "cuda", "emulated"):
        pytest.skip(f"{backend}: the functions check, and PyTorch's operations")
    logits = random(4, 6).to(device)
    for wrong in (logits[:3], logits[:, :5], logits.half(), logits[0]):
        with pytest.raises(RuntimeError, match="teacher: needs"):
            ops.op(backend, "distillation_forward")(logits, wrong, 1.0)

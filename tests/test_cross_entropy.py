"""The ops of cross-entropy on every backend: their numbers against PyTorch in fp64, any shape.

The functions and modules built on them are in test_cross_entropy_layers.py, distillation in test_distillation.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import ops
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, dtypes_of
from tests.ulp import spacing

IGNORED = -100
WIDTHS = (1, 2, 3, 7, 31, 32, 33, 129, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 50_257)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes_of(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(width, (rows,), generator=torch.Generator().manual_seed(seed))


def arguments(target, weight=None, ignore_index=IGNORED, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    """What follows the logits (and lse) in a call of the ops."""
    return target, weight, ignore_index, label_smoothing, z_loss, softcap


def forward(backend: str, logits: Tensor, *rest) -> tuple[Tensor, Tensor]:
    return ops.op(backend, "cross_entropy_forward")(logits, *arguments(*rest))


def backward(backend: str, dloss: Tensor, logits: Tensor, lse: Tensor, *rest) -> Tensor:
    return ops.op(backend, "cross_entropy_backward")(dloss, logits, lse, *arguments(*rest))


def exact(dloss, logits, target, weight=None, ignore_index=IGNORED, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    """Loss, lse and gradient by PyTorch in fp64, and the gradient's size before its terms cancel."""
    logits = logits.detach().cpu().double().requires_grad_()
    target, weight = target.cpu(), None if weight is None else weight.cpu().double()
    counted = torch.ones(len(logits)) if target.is_floating_point() else (target != ignore_index).double()
    if target.is_floating_point():
        target, ignore_index = target.double(), IGNORED
    s = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = torch.logsumexp(s, 1)
    loss = F.cross_entropy(s, target, weight, None, ignore_index, None, "none", label_smoothing)
    loss = loss + z_loss * lse.square() * counted
    (gradient,) = torch.autograd.grad(loss, logits, dloss.detach().cpu().double())
    p = torch.exp(s - lse[:, None])
    largest = 1.0 if weight is None else weight.max()
    size = p * (largest + 2 * z_loss * lse.abs()[:, None]) * (1 + lse.abs()[:, None] + s.abs())
    q = target if target.is_floating_point() else torch.zeros_like(s)  # a class's own 1 - p is p's error alone
    size = size + largest * ((1 - label_smoothing) * q + label_smoothing / max(s.shape[1], 1))
    return loss.detach(), lse.detach(), gradient, (size * dloss.cpu().double().abs()[:, None]).detach()


def check(backend: str, logits: Tensor, target: Tensor, *rest, dloss: Tensor | None = None) -> None:
    """Loss and gradient against fp64. The gradient: 1 ulp in 16 bits, 4 else, and what fp32's lse - logit leaves."""
    dloss = random(len(logits), seed=1).to(logits.device, ops.computed_in(logits)) if dloss is None else dloss
    loss, lse = forward(backend, logits, target, *rest)
    dlogits = backward(backend, dloss, logits, lse, target, *rest)
    assert loss.dtype == lse.dtype == ops.computed_in(logits) and loss.shape == lse.shape == logits.shape[:1]
    assert dlogits.dtype == logits.dtype and dlogits.shape == logits.shape and dlogits.is_contiguous()
    exact_loss, exact_lse, exact_gradient, size = exact(dloss, logits, target, *rest)
    eps = torch.finfo(loss.dtype).eps
    scale = logits.abs().amax(1).cpu().double() if logits.numel() else torch.zeros(len(logits))
    for name, actual, value in (("loss", loss, exact_loss), ("lse", lse, exact_lse)):
        error = (actual.cpu().double() - value).abs() / (eps * (1 + value.abs() + scale))
        assert len(error) == 0 or error.max() <= 8, f"{name}: {error.max():.2f} ulp"
    error = (dlogits.cpu().double() - exact_gradient).abs()
    # In fp64, what it is compared with is as inexact.
    factor = 64 if logits.dtype == torch.float64 else 4
    allowed = (1 if logits.dtype in HALVES else 4) * spacing(exact_gradient, logits.dtype) + factor * eps * size
    assert (error <= allowed).all(), f"dlogits: {(error / allowed).max():.2f} of what is allowed"


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(backend, device, dtype, width) -> None:
    if dtype not in dtypes_of(backend):
        pytest.skip(f"{backend}: does not serve {dtype}")
    for spread in (1, 10):
        logits = (spread * random(3, width)).to(device, dtype)
        check(backend, logits, classes_of(3, width).to(device))


@pytest.mark.parametrize("width", (70_000, 262_144))
def test_wide_rows(backend, device, width) -> None:
    logits = (3 * random(2, width)).to(device, torch.bfloat16)
    check(backend, logits, classes_of(2, width).to(device))


OPTIONS = {
    "plain": {},
    "weight": {"weight": True},
    "ignored": {"ignore_index": 2},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing alone": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 5.0},
    "all": {"weight": True, "ignore_index": 2, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0},
}


def given(options: dict, width: int, device: str) -> tuple:
    """The options as positional arguments after the target."""
    weight = 0.5 + random(width, seed=2).abs().to(device) if "weight" in options else None
    return weight, *(options.get(name, default) for name, default in DEFAULTS.items())


DEFAULTS = {"ignore_index": IGNORED, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0}


@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=() if o in ("plain", "all") else pytest.mark.exhaustive) for o in OPTIONS]
)
@pytest.mark.parametrize("kind", ("classes", "probabilities", "fp32 probabilities"))
def test_every_option(backend, device, options, kind) -> None:
    for dtype, width in itertools.product(dtypes_of(backend), (5, 64, 1027, 9000)):
        logits = (3 * random(6, width)).to(device, dtype)
        if kind == "classes":
            target = classes_of(6, width)
            target[::2] = 2  # ignored by some
        else:
            target = random(6, width, seed=3).softmax(1).to(torch.float32 if "fp32" in kind else dtype)
            if dtype == torch.float64:
                target = target.double()
        check(backend, logits, target.to(device), *given(OPTIONS[options], width, device))


@pytest.mark.parametrize("width", (8, 1000, 5000, 100_000))
def test_few_finite_logits(backend, device, width) -> None:
    """flash-attention#1930 (NaN where nearly all are -inf), also with the only finite ones at either end."""
    for kept in ([width // 2], [0], [width - 1], [0, width - 1], list(range(width - 3, width))):
        logits = torch.full((1, width), -torch.inf, device=device, dtype=torch.bfloat16)
        logits[0, kept] = random(len(kept)).to(logits)
        target = torch.tensor([kept[-1]], device=device)
        loss, lse = forward(backend, logits, target)
        dlogits = backward(backend, torch.ones_like(loss), logits, lse, target)
        expected = F.cross_entropy(logits[:, kept].double().cpu(), torch.tensor([len(kept) - 1]), reduction="none")
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-6)
        others = torch.ones(width, dtype=torch.bool)
        others[kept] = False
        assert dlogits.isfinite().all() and (dlogits[0, others] == 0).all()
    # A class of no probability and no logit adds nothing.
    q = torch.zeros(1, width, device=device)
    q[0, -1] = 1
    loss, lse = forward(backend, logits, q)
    assert loss.isfinite().all() and backward(backend, torch.ones_like(loss), logits, lse, q).isfinite().all()
    # A target of no probability: an infinite loss, as in PyTorch, and the gradient of p alone.
    target = torch.zeros(1, dtype=torch.long, device=device)
    loss, lse = forward(backend, logits, target)
    dlogits = backward(backend, torch.ones_like(loss), logits, lse, target)
    assert loss.tolist() == [torch.inf] and dlogits.isfinite().all() and dlogits[0, 0] == -1


@pytest.mark.parametrize("width", (5, 3000, 20_000))
def test_rows_that_are_not_finite_stay_alone(backend, device, width) -> None:
    logits, target = random(5, width).to(device), classes_of(5, width).to(device)
    alone = forward(backend, logits[[0, 4]], target[[0, 4]])
    logits[1] = -torch.inf
    logits[2, width - 1], logits[3, width // 2] = torch.nan, torch.inf
    loss, lse = forward(backend, logits, target)
    dlogits = backward(backend, torch.ones_like(loss), logits, lse, target)
    assert loss[1:4].isnan().all() and dlogits[1:4].isnan().all()
    assert torch.equal(loss[[0, 4]], alone[0]) and dlogits[[0, 4]].isfinite().all()


def test_the_ends_of_the_dtypes(backend, device) -> None:
    for dtype, end in ((torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, -1e7), (torch.float32, 1e14)):
        logits = torch.tensor([[end, end, -end, 0.0], [end + 1, end, end, end]], device=device).to(dtype)
        target = torch.tensor([1, 0], device=device)
        loss, lse = forward(backend, logits, target)
        dlogits = backward(backend, torch.ones_like(loss), logits, lse, target)
        wide = logits.cpu().double()
        expected = F.cross_entropy(wide, target.cpu(), reduction="none")
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        one_hot = F.one_hot(target.cpu(), 4)
        if abs(end) < 1e7:  # beyond, fp32 has no lse that tells the logits apart
            torch.testing.assert_close(dlogits.cpu().double(), wide.softmax(1) - one_hot, rtol=1e-2, atol=1e-2)
        assert dlogits.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradient_of_a_class_that_is_nearly_certain(backend, device, dtype) -> None:
    """Liger#1329: p - 1, of a p of 0.9 to 0.99999, is not the p of 16 bits less 1."""
    logits = torch.tensor([[2.25, 0.0], [4.5, 0.0], [7.0, 0.0], [9.0, 0.0], [11.0, 0.0]], device=device, dtype=dtype)
    target = torch.zeros(5, dtype=torch.long, device=device)
    loss, lse = forward(backend, logits, target)
    dlogits = backward(backend, torch.ones_like(loss), logits, lse, target)
    rest = torch.sigmoid(-logits[:, 0].double().cpu())
    torch.testing.assert_close(loss.cpu().double(), -torch.log1p(-rest), rtol=1e-5, atol=0)
    error = (dlogits[:, 0].cpu().double() + rest).abs()
    # lse is an fp32 number: 11 + 2e-5 to the nearest 1e-6.
    assert (error <= spacing(rest, dtype) + lse.cpu().double() * torch.finfo(torch.float32).eps).all()


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_gradient_of_a_certain_class_is_that_of_the_lse_given(backend, device, dtype) -> None:
    """With the same lse there is nothing but rounding to lose: p - 1 from expm1, also next to p = 1."""
    beyond = 2.0 ** -torch.arange(1, 19)
    logits = torch.stack([torch.ones(18), torch.full((18,), -30.0)], 1).to(device, dtype)
    lse, dloss = (1 + beyond).to(device), torch.ones(18, device=device)
    classes = torch.zeros(18, dtype=torch.long, device=device)
    one_hot = torch.tensor([[1.0, 0.0]], device=device).expand(18, 2)
    for target in (classes, one_hot):
        dlogits = backward(backend, dloss, logits, lse, target)[:, 0].cpu()
        exact_gradient = torch.expm1(-beyond.double())
        assert ((dlogits.double() - exact_gradient).abs() <= spacing(exact_gradient, dtype)).all(), dlogits


def test_ignored_rows_are_zero_whatever_they_hold(backend, device) -> None:
    logits = random(4, 9).to(device)
    logits[1], logits[2, 3] = -torch.inf, torch.nan
    target = torch.tensor([3, 4, 4, 4], device=device)
    for options in ((), (0.1, 0.5, 3.0)):
        loss, lse = forward(backend, logits, target, None, 4, *options)
        dlogits = backward(backend, torch.ones_like(loss), logits, lse, target, None, 4, *options)
        assert loss[0] > 0 and loss[1:].tolist() == [0.0] * 3 and (dlogits[1:] == 0).all()
    # The index that is ignored need not be a class.
    for ignored in (-1, 9, 2**40):
        loss, _ = forward(backend, logits, torch.full_like(target, ignored), None, ignored)
        assert loss.tolist() == [0.0] * 4


@pytest.mark.parametrize("wrong", (-1, 6, 2**31, -(2**40)))
def test_target_out_of_range(backend, device, wrong) -> None:
    """An error on the CPU, before anything is written; NaN in that row alone on a GPU, which reads nothing there."""
    logits, target = random(3, 6).to(device), torch.tensor([1, wrong, 5], device=device)
    weight, dloss, lse = torch.ones(6, device=device), torch.ones(3, device=device), torch.zeros(3, device=device)
    if backend == "cpu" or (backend == "reference" and device == "cpu"):
        before = logits.clone()
        with pytest.raises(IndexError, match=f"target: got {wrong} at row 1, needs 0 to 5"):
            forward(backend, logits, target, weight)
        with pytest.raises(IndexError, match=f"target: got {wrong} at row 1"):
            backward(backend, dloss, logits, lse, target, weight)
        with pytest.raises(IndexError, match=f"target: got {wrong} at row 1"):
            ops.op(backend, "cross_entropy_backward_")(dloss, logits, lse, *arguments(target, weight))
        assert torch.equal(logits, before)
        return
    for smoothing in (0.0, 0.1):
        loss, lse = forward(backend, logits, target, weight, IGNORED, smoothing)
        dlogits = backward(backend, dloss, logits, lse, target, weight, IGNORED, smoothing)
        assert loss.isnan().tolist() == [False, True, False]
        assert dlogits.isnan().all(1).tolist() == dlogits.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ("classes", "probabilities"))
def test_over_the_logits(backend, device, kind) -> None:
    """The same bits as in fresh memory."""
    for dtype, width in itertools.product(dtypes_of(backend), (1, 7, 1024, 9001)):
        logits, dloss = random(4, width).to(device, dtype), random(4, seed=1).to(device)
        dloss = dloss.to(torch.float64 if dtype == torch.float64 else torch.float32)
        target = classes_of(4, width) if kind == "classes" else random(4, width).softmax(1).to(dtype)
        rest = arguments(target.to(device), None, IGNORED, 0.1, 0.01, 8.0)
        _, lse = ops.op(backend, "cross_entropy_forward")(logits, *rest)
        expected = ops.op(backend, "cross_entropy_backward")(dloss, logits, lse, *rest)
        assert ops.op(backend, "cross_entropy_backward_")(dloss, logits, lse, *rest) is None
        assert torch.equal(logits, expected)


def test_over_strided_logits(backend, device) -> None:
    """The gaps between rows stay as they are."""
    buffer = random(4, 12).to(device)
    logits, target = buffer[:, 1:11], classes_of(4, 10).to(device)
    before = buffer.clone()
    loss, lse = forward(backend, logits, target)
    expected = backward(backend, torch.ones_like(loss), logits.contiguous(), lse, target)
    ops.op(backend, "cross_entropy_backward_")(torch.ones_like(loss), logits, lse, *arguments(target))
    torch.testing.assert_close(buffer[:, 1:11], expected)
    assert torch.equal(buffer[:, [0, 11]], before[:, [0, 11]])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "channels last"])
@pytest.mark.parametrize("kind", ("classes", "probabilities"))
def test_layouts(backend, device, kind, layout) -> None:
    """Any strides and alignment of every tensor: the same answer as from contiguous copies."""
    for dtype, width in itertools.product((torch.float16, torch.float32), (5, 64, 1024)):
        logits = laid_out(random(6, width).to(device, dtype), layout)
        if kind == "classes":
            target = laid_out(classes_of(6, width).to(device), layout)
        else:
            target = laid_out(random(6, width).softmax(1).to(device, dtype), layout)
        weight, dloss = (laid_out(random(n).abs().to(device), layout) for n in (width, 6))
        results = []
        for tensors in (
            (logits, target, weight, dloss),
            tuple(t.contiguous() for t in (logits, target, weight, dloss)),
        ):
            x, t, w, d = tensors
            loss, lse = forward(backend, x, t, w)
            results.append((loss, lse, backward(backend, d, x, lse, t, w)))
        for actual, value in zip(*results, strict=True):
            assert actual.is_contiguous()
            torch.testing.assert_close(actual, value, rtol=2e-3, atol=2e-5)


def test_alignment(backend, device) -> None:
    """Logits and probabilities at every distance from a 16-byte boundary, where rows would fit one."""
    for dtype, offset, which in itertools.product((torch.bfloat16, torch.float32), (1, 3, 4, 7), range(2)):
        values = [random(3, 64, seed=i).softmax(1).to(device, dtype) for i in range(2)]
        moved = list(values)
        moved[which] = torch.cat([values[which].new_zeros(offset), values[which].flatten()])[offset:].view(3, 64)
        results = []
        for logits, target in (values, moved):
            loss, lse = forward(backend, logits, target)
            results.append((loss, lse, backward(backend, loss, logits, lse, target)))
        for actual, value in zip(*results, strict=True):
            torch.testing.assert_close(actual, value)


@pytest.mark.parametrize("shape", ((0, 5), (0, 0), (3, 0), (1, 1)), ids=str)
def test_small_shapes(backend, device, shape) -> None:
    """No classes: a loss of 0 where the row is ignored, or its probabilities are as many as there are: none."""
    logits = random(*shape).to(device)
    classes = torch.zeros(shape[0], dtype=torch.long, device=device)
    for target in (classes if shape[1] else classes + IGNORED, torch.ones(shape, device=device)):
        loss, lse = forward(backend, logits, target)
        assert loss.shape == lse.shape == shape[:1] and loss.tolist() == [0.0] * shape[0]
        assert backward(backend, loss, logits, lse, target).shape == shape


def test_more_rows_than_a_grid_has(backend, device) -> None:
    rows = 65_600 if backend != "triton" else 1100  # its interpreter takes a program a row
    check(backend, random(rows, 3).to(device, torch.float16), classes_of(rows, 3).to(device))


def test_runs_repeat_and_threads_do_not_matter(backend, device) -> None:
    logits, target = random(300, 700).to(device, torch.bfloat16), classes_of(300, 700).to(device)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            loss, lse = forward(backend, logits, target)
            results.append((loss, lse, backward(backend, loss, logits, lse, target)))
    finally:
        torch.set_num_threads(threads)
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))
    loss, _ = forward(backend, logits[7:8], target[7:8])
    assert torch.equal(loss, results[0][0][7:8])


@pytest.mark.exhaustive
def test_opcheck(backend, device) -> None:
    for dtype, width in ((torch.float32, 5), (torch.float16, 16)):
        logits, weight = random(3, width).to(device, dtype), torch.ones(width, device=device)
        for target in (classes_of(3, width).to(device), random(3, width).softmax(1).to(device, dtype)):
            rest = arguments(target, weight, IGNORED, 0.1, 0.01, 5.0)
            torch.library.opcheck(ops.op(backend, "cross_entropy_forward"), (logits, *rest))
            loss, lse = ops.op(backend, "cross_entropy_forward")(logits, *rest)
            torch.library.opcheck(ops.op(backend, "cross_entropy_backward"), (loss, logits, lse, *rest))
            torch.library.opcheck(ops.op(backend, "cross_entropy_backward_"), (loss, logits, lse, *rest))


def test_bad_arguments(backend, device) -> None:
    """What would read past an end raises; the functions check the rest (test_cross_entropy_layers.py)."""
    if backend not in ("cpu", "cuda", "emulated"):
        pytest.skip(f"{backend}: the functions check, and PyTorch's operations")
    logits, target = random(4, 6).to(device), classes_of(4, 6).to(device)
    loss, lse = forward(backend, logits, target)
    for wrong in (target[:3], target.int(), target[:, None], random(4, 5).to(device), random(3, 6).to(device)):
        with pytest.raises(RuntimeError, match="target: needs"):
            forward(backend, logits, wrong)
        with pytest.raises(RuntimeError, match="target: needs"):
            backward(backend, loss, logits, lse, wrong)
    for weight in (torch.ones(5, device=device), torch.ones(6, device=device).half()):
        with pytest.raises(RuntimeError, match="weight: needs"):
            forward(backend, logits, target, weight)
    for name, tensors in (("dloss", (loss[:3], logits, lse)), ("lse", (loss, logits, lse[:3]))):
        with pytest.raises(RuntimeError, match=f"{name}: needs"):
            backward(backend, *tensors, target)

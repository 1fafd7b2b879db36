"""cross_entropy, distillation_loss and their modules, against PyTorch's own in fp64."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from memkern.functional import cross_entropy, distillation_loss
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, dtypes_of, needs_fp64
from tests.test_cross_entropy import classes_of, random
from tests.ulp import spacing

REDUCTIONS = ("none", "mean", "sum")
SHAPES = ((5,), (4, 5), (4, 5, 3), (2, 7, 3, 4), (0, 5), (2, 5, 0), (3, 0))


def a_target(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Classes, the second of which is ignored, or probabilities, for logits of a shape."""
    if kind == "probabilities":
        return random(*shape, seed=1).softmax(min(1, len(shape) - 1))
    dim = min(1, len(shape) - 1)
    target = torch.randint(10**6, (*shape[:dim], *shape[dim + 1 :]), generator=torch.Generator().manual_seed(1))
    target = target % shape[dim] if shape[dim] else torch.full_like(target, -100)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return target


def gradients(loss: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    """Of a sum with a weight of its own for each loss (Liger#1298: a gradient that is not uniform)."""
    factors = 1 + torch.arange(loss.numel()).reshape(loss.shape).to(loss)
    return torch.autograd.grad((loss * factors).sum(), wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ("classes", "probabilities"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_place_of_torchs(backend, device, shape, kind, reduction) -> None:
    for weighted, smoothing in itertools.product((False, True), (0.0, 0.1)):
        if smoothing and 0 in shape[:2] and kind == "classes":
            continue  # PyTorch gives NaN for a sum of nothing
        weight = 0.5 + random(shape[min(1, len(shape) - 1)], seed=2).abs() if weighted else None
        options = {"reduction": reduction, "label_smoothing": smoothing}
        target = a_target(kind, shape)
        x = random(*shape).double().requires_grad_()
        wide = target.double() if target.is_floating_point() else target
        expected = F.cross_entropy(x, wide, None if weight is None else weight.double(), **options)
        y = x.detach().float().to(device).requires_grad_()
        loss = cross_entropy(y, target.to(device), None if weight is None else weight.to(device), **options)
        assert loss.shape == expected.shape and loss.dtype == torch.float32
        torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        (found,), (exact,) = gradients(loss, y), gradients(expected, x)
        torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_torch_gives_where_nothing_counts(backend, device) -> None:
    """PyTorch's contract: NaN for a mean, 0 for a sum; the gradient is 0."""
    x = random(3, 5).to(device).requires_grad_()
    ignored = torch.full((3,), -100, device=device)
    for weight, smoothing in itertools.product((None, torch.ones(5, device=device)), (0.0, 0.1)):
        options = {"weight": weight, "label_smoothing": smoothing}
        assert cross_entropy(x, ignored, **options).isnan() and cross_entropy(x[:0], ignored[:0], **options).isnan()
        assert cross_entropy(x, ignored, reduction="sum", **options) == 0
        for in_forward in (False, True):
            (gradient,) = torch.autograd.grad(cross_entropy(x, ignored, grad_in_forward=in_forward, **options), x)
            assert (gradient == 0).all()
    options = {"weight": torch.zeros(5, device=device)}  # classes count and weigh nothing: 0 / 0 both
    for f in (cross_entropy, F.cross_entropy):
        loss = f(x, ignored + 102, **options)
        assert loss.isnan() and torch.autograd.grad(loss, x)[0].isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dtype_of_the_loss_is_torchs(backend, device, dtype) -> None:
    """That of the logits, and float32 under autocast."""
    x, target = random(6, 50).to(device, dtype).requires_grad_(), classes_of(6, 50).to(device)
    for reduction in REDUCTIONS:
        exact = F.cross_entropy(x.detach().cpu().double(), target.cpu(), reduction=reduction)
        loss = cross_entropy(x, target, reduction=reduction)
        assert loss.dtype == F.cross_entropy(x, target, reduction=reduction).dtype == dtype
        assert ((loss.cpu().double() - exact).abs() <= spacing(exact, dtype)).all()
        with torch.autocast(device, dtype):
            loss = cross_entropy(x, target, reduction=reduction)
            assert loss.dtype == F.cross_entropy(x, target, reduction=reduction).dtype == torch.float32
        torch.testing.assert_close(loss.cpu().double(), exact, rtol=1e-6, atol=1e-6)
        assert torch.autograd.grad(loss.sum(), x)[0].dtype == dtype


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("expanded", "stride 0")])
def test_any_layout(backend, device, layout) -> None:
    for shape in ((6, 5), (2, 6, 3, 4)):
        x, target = random(*shape).to(device), a_target("classes", shape).to(device)
        expected = cross_entropy(x, target, reduction="none")
        loss = cross_entropy(laid_out(x, layout), laid_out(target, layout), reduction="none")
        torch.testing.assert_close(loss, expected)


def test_targets_of_other_dtypes(backend, device) -> None:
    x, target = random(4, 5).to(device), classes_of(4, 5).to(device)
    assert torch.equal(cross_entropy(x, target.to(torch.uint8)), cross_entropy(x, target))
    q = random(4, 5, seed=1).softmax(1).to(device)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        expected = F.cross_entropy(x.cpu().double(), q.to(dtype).cpu().double())
        torch.testing.assert_close(cross_entropy(x, q.to(dtype)).cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_deprecated_forms_of_reduction(backend, device) -> None:
    x, target = random(4, 5).to(device), classes_of(4, 5).to(device)
    for size_average, reduce in ((True, None), (False, None), (None, False), (False, True)):
        with pytest.warns(UserWarning, match="deprecated"):
            loss = cross_entropy(x, target, None, size_average, -100, reduce)
        with pytest.warns(UserWarning, match="deprecated"):
            torch.testing.assert_close(loss, F.cross_entropy(x, target, None, size_average, -100, reduce))


def test_backward_twice_and_inputs_untouched(backend, device) -> None:
    x, target = random(5, 33).to(device).requires_grad_(), classes_of(5, 33).to(device)
    before = x.detach().clone()
    loss = cross_entropy(x, target)
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once) and torch.equal(x, before)


OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.3, "softcap": 4.0}


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("kind", ("classes", "probabilities"))
def test_derivatives_of_every_kind(backend, device, kind, weighted) -> None:
    """Of logits, of probabilities, and of the weights of both."""
    needs_fp64(backend)
    x = random(3, 4).double().to(device).requires_grad_()
    weight = (0.5 + random(4, seed=2).abs()).double().to(device).requires_grad_() if weighted else None
    target = a_target(kind, (3, 4)).to(device)
    given = [x]
    if kind == "probabilities":
        target = target.double().requires_grad_()
        given.append(target)
    given += [weight] if weighted else []

    def f(*tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        logits, q = next(rest), next(rest) if kind == "probabilities" else target
        return cross_entropy(logits, q, next(rest, None), reduction="none", **OPTIONS)

    checks = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(f, given, **checks)
    assert torch.autograd.gradgradcheck(f, given, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_derivatives_of_distillation(backend, device) -> None:
    needs_fp64(backend)
    given = [t.clone().requires_grad_() for t in random(2, 3, 4).double().to(device)]
    checks = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(lambda *t: distillation_loss(*t, 2.0, "none"), given, **checks)
    assert torch.autograd.gradgradcheck(lambda *t: distillation_loss(*t, 2.0), given, check_fwd_over_rev=True)


def test_function_transforms(backend, device) -> None:
    x, target = random(6, 3, 8).to(device), classes_of(18, 8).reshape(6, 3).to(device)
    q, weights = random(6, 3, 8, seed=1).softmax(2).to(device), 0.5 + random(6, 8, seed=2).abs().to(device)

    def both(transform):
        ours = transform(lambda *t: cross_entropy(*t, label_smoothing=0.1))
        torchs = transform(lambda *t: F.cross_entropy(*t, label_smoothing=0.1))
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)

    both(lambda f: torch.vmap(f)(x, target))
    both(lambda f: torch.vmap(f, (0, None))(x, target[0]))
    both(lambda f: torch.vmap(f, (1, 1))(x.movedim(0, 1), target.movedim(0, 1)))
    both(lambda f: torch.vmap(f)(x, target, weights))  # an ensemble
    both(lambda f: torch.vmap(f)(x, q))
    both(lambda f: torch.func.grad(f)(x[0], target[0]))
    both(lambda f: torch.func.grad(f, (0, 1))(x[0], q[0]))
    both(lambda f: torch.vmap(torch.func.grad(f))(x, target))
    both(lambda f: torch.vmap(torch.func.grad(f))(x, target, weights))
    both(lambda f: torch.func.jvp(lambda x: f(x, target[0]), (x[0],), (x[1],)))
    both(lambda f: torch.func.jvp(f, (x[0], q[0]), (x[1], q[1])))
    both(lambda f: torch.func.hessian(lambda x: f(x, target[0]))(x[0]))
    teacher = random(6, 3, 8, seed=3).to(device)
    gradient = torch.func.grad(lambda x, t: distillation_loss(x, t, 2.0))
    one_by_one = torch.stack([gradient(x[i], teacher[i]) for i in range(6)])
    torch.testing.assert_close(torch.vmap(gradient)(x, teacher), one_by_one)


@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
@pytest.mark.parametrize("kind", ("classes", "probabilities", "grad_in_forward", "overwrite", "distillation"))
def test_compile_fullgraph(backend, device, kind, compiler) -> None:
    torch._dynamo.reset()
    x, other = (t.requires_grad_() for t in random(2, 4, 8).to(device).unbind())
    target = a_target("probabilities" if kind == "probabilities" else "classes", (4, 8)).to(device)
    in_forward = {"grad_in_forward": kind in ("grad_in_forward", "overwrite"), "overwrite_logits": kind == "overwrite"}

    def f(x, other):
        if kind == "distillation":
            return distillation_loss(2 * x, other, 2.0)
        return cross_entropy(2 * x, target, **OPTIONS, **in_forward)

    expected = torch.autograd.grad(f(x, other), x)
    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    torch.testing.assert_close(compiled(x, other), f(x, other))
    torch.testing.assert_close(torch.autograd.grad(compiled(x, other), x), expected)


def test_export(backend, device) -> None:
    layer = memkern.nn.CrossEntropyLoss(label_smoothing=0.1)
    x, target = random(4, 8).to(device), classes_of(4, 8).to(device)
    rows = torch.export.Dim.DYNAMIC
    program = torch.export.export(layer, (x, target), dynamic_shapes=({0: rows}, {0: rows}))
    longer = torch.cat([x, -x]), torch.cat([target, target])
    torch.testing.assert_close(program.module()(*longer), layer(*longer))


def test_no_data() -> None:
    """Meta and fake tensors."""
    x = torch.empty(3, 5, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for options in ({}, {"grad_in_forward": True}, {"weight": torch.empty(5, device="meta")}):
        loss = cross_entropy(x, torch.empty(3, dtype=torch.long, device="meta"), **options)
        loss.backward()
        assert (loss.dtype, loss.shape, x.grad.shape) == (torch.bfloat16, (), (3, 5))
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(3, 4, requires_grad=True)
        (cross_entropy(x, torch.randint(4, (3,))) + distillation_loss(x, x.detach())).backward()
        assert x.grad.shape == (3, 4)


@pytest.mark.parametrize("reduction", ("batchmean", "sum", "none", "mean"))
def test_distillation_loss(backend, device, reduction) -> None:
    for dtype, shape in itertools.product(dtypes_of(backend), ((7,), (4, 7), (2, 3, 7), (0, 7))):
        student, teacher = random(2, *shape).to(device, dtype).unbind()
        student = student.clone().requires_grad_()
        wide = student.detach().cpu().double().requires_grad_()
        log_p, log_t = (F.log_softmax(t / 2, -1) for t in (wide, teacher.cpu().double()))
        rows = 4 * F.kl_div(log_p, log_t, reduction="none", log_target=True).sum(-1)
        first = shape[0] if len(shape) > 1 else 1
        expected = {"batchmean": rows.sum() / first, "sum": rows.sum(), "none": rows, "mean": rows.mean()}[reduction]
        loss = distillation_loss(student, teacher, 2.0, reduction)
        assert loss.dtype == dtype and loss.shape == expected.shape
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(loss.cpu().double(), expected, **tolerance)
        (found,), (exact,) = gradients(loss, student), gradients(expected, wide)
        torch.testing.assert_close(found.cpu().double(), exact, **tolerance)
    with torch.autocast(device, torch.bfloat16):
        assert distillation_loss(student.bfloat16(), teacher.float(), 2.0, reduction).dtype == torch.float32


def test_modules_are_drop_ins(backend, device) -> None:
    weight = 0.5 + random(5, seed=2).abs()
    x, target = random(4, 5).to(device), classes_of(4, 5).to(device)
    for options in ({}, {"weight": weight, "reduction": "sum"}, {"ignore_index": 1, "label_smoothing": 0.1}):
        layer = memkern.nn.CrossEntropyLoss(**options).to(device)
        model = torch.nn.CrossEntropyLoss(**options).to(device)
        assert isinstance(layer, torch.nn.CrossEntropyLoss) and repr(layer) == repr(model)
        assert layer.state_dict().keys() == model.state_dict().keys()
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(twin(x, target), model(x, target))
    layer = memkern.nn.CrossEntropyLoss(**OPTIONS, grad_in_forward=True)
    assert repr(layer) == "CrossEntropyLoss(z_loss=0.3, softcap=4.0, grad_in_forward=True)"
    assert torch.equal(layer(x, target), cross_entropy(x, target, **OPTIONS))


def test_bad_tensors(backend, device) -> None:
    x, target = random(4, 5).to(device), classes_of(4, 5).to(device)
    for value, what in ((None, "NoneType"), (x.long(), "dtype torch.int64"), (x.cfloat(), "dtype torch.complex64")):
        with pytest.raises(TypeError, match=f"input: got {what}"):
            cross_entropy(value, target)
    with pytest.raises(ValueError, match="input: got no dimension"):
        cross_entropy(x[0, 0], target[0])
    nested, sparse = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), x.to_sparse()
    for value, what in ((nested, "a nested tensor"), (sparse, "layout torch.sparse_coo")):
        for name, tensors in (("input", (value, target)), ("target", (x, value)), ("weight", (x, target, value))):
            with pytest.raises(TypeError, match=f"{name}: got {what}, needs a dense tensor"):
                cross_entropy(*tensors)
    for value, what in ((None, "NoneType"), (target.int(), "dtype torch.int32"), (target > 2, "dtype torch.bool")):
        with pytest.raises(TypeError, match=f"target: got {what}"):
            cross_entropy(x, value)
    for value in (target[:3], target[:, None], x.long()):
        with pytest.raises(ValueError, match="target: got classes of shape"):
            cross_entropy(x, value)
    with pytest.raises(ValueError, match="target: got probabilities of shape"):
        cross_entropy(x, x[0])
    with pytest.raises(ValueError, match="target: got device meta"):
        cross_entropy(x, target.to("meta"))
    with pytest.raises(ValueError, match=r"weight: got shape \(4,\), needs \(5,\)"):
        cross_entropy(x, target, torch.ones(4, device=device))
    with pytest.raises(TypeError, match="weight: got dtype torch.int64"):
        cross_entropy(x, target, torch.ones(5, device=device).long())
    with pytest.raises(ValueError, match="weight: got device meta"):
        cross_entropy(x, target, torch.ones(5, device="meta"))


def test_class_out_of_range(backend, device) -> None:
    x, target = random(3, 5).to(device).requires_grad_(), torch.tensor([1, 5, 0], device=device)
    if backend in ("cpu", "reference") and device == "cpu":
        with pytest.raises(IndexError, match="target: got 5 at row 1, needs 0 to 4"):
            cross_entropy(x, target)
        return
    loss = cross_entropy(x, target, torch.ones(5, device=device))
    assert loss.isnan() and torch.autograd.grad(loss, x)[0].isnan().all(1).tolist() == [False, True, False]


def test_bad_options(backend, device) -> None:
    x, target = random(4, 5).to(device), classes_of(4, 5).to(device)
    for function in (lambda **options: cross_entropy(x, target, **options), memkern.nn.CrossEntropyLoss):
        with pytest.raises(ValueError, match="reduction: got 'average', needs 'none' or 'mean' or 'sum'"):
            function(reduction="average")
        for name, bad in (
            ("label_smoothing", 1.5), ("label_smoothing", -0.1), ("z_loss", -1.0), ("z_loss", 1e39), ("softcap", 0.0),
            ("softcap", 1e-46), ("softcap", 1e39), ("ignore_index", 2**70), ("ignore_index", -(2**70)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=re.escape(f"{name}: got {bad}, needs")):
                function(**{name: bad})
        for name in ("label_smoothing", "z_loss", "softcap"):
            with pytest.raises(ValueError, match=f"{name}: got nan, needs"):
                function(**{name: float("nan")})
            with pytest.raises(TypeError, match=f"{name}: got str, needs a number"):
                function(**{name: "1"})
        for bad in (1.0, True):
            with pytest.raises(TypeError, match=f"ignore_index: got {type(bad).__name__}"):
                function(ignore_index=bad)
        with pytest.raises(ValueError, match="overwrite_logits: needs grad_in_forward=True"):
            function(overwrite_logits=True)
    with pytest.raises(ValueError, match="ignore_index: got 2, which does not go with probabilities"):
        cross_entropy(x, x.softmax(1), ignore_index=2)


def test_bad_distillation(backend, device) -> None:
    x = random(4, 5).to(device)
    with pytest.raises(ValueError, match=r"teacher: got shape torch.Size\(\[4, 4\]\), needs that of student"):
        distillation_loss(x, x[:, :4])
    with pytest.raises(ValueError, match="teacher: got device meta"):
        distillation_loss(x, x.to("meta"))
    with pytest.raises(TypeError, match="teacher: got list"):
        distillation_loss(x, [0.0])
    with pytest.raises(ValueError, match="student: got no dimension"):
        distillation_loss(x[0, 0], x[0, 0])
    for temperature in (0.0, -1.0, 1e-320, 1e30, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature: got"):
            distillation_loss(x, x, temperature)
    with pytest.raises(ValueError, match="reduction: got 'average'"):
        distillation_loss(x, x, reduction="average")

"""The norm functions on every backend, against PyTorch's own norms in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import memkern
from memkern.functional import norm as norms
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, assert_close, call, check, dtypes_of, each_kind, exact_call, needs_fp64, parameters


@each_kind
@pytest.mark.parametrize("memory_efficient", (False, True))
@pytest.mark.parametrize("given", ("nothing", "weight", "weight, bias", "bias", "residual", "residual, weight, bias"))
def test_every_mix_of_arguments(backend, device, kind, given, memory_efficient) -> None:
    for dtype in dtypes_of(backend):
        for parameter_dtype in {dtype, torch.float32 if dtype in HALVES else dtype}:
            weight, bias = parameters((3, 7), parameter_dtype, device)
            x = torch.randn(5, 2, 3, 7, generator=torch.Generator().manual_seed(0)).to(device, dtype)
            residual = -x / 2 if "residual" in given else None  # a sum that needs no rounding
            check(
                kind,
                x,
                residual,
                weight if "weight" in given else None,
                bias if "bias" in given else None,
                (3, 7),
                ulps=8 if memory_efficient else 3,
                memory_efficient=memory_efficient,
                eps=1e-3,
            )
            if kind == "rms_norm":
                check(kind, x, residual, weight - 1, None, (3, 7), ulps=8, zero_centred=True, eps=1e-3)


def test_weight_and_bias_of_two_dtypes(backend, device) -> None:
    x = torch.randn(5, 7).to(device, torch.bfloat16)
    weight, bias = parameters((7,), torch.float32, device)
    check("layer_norm", x, None, weight, bias.bfloat16(), (7,), eps=1e-3)
    check("layer_norm", x, None, weight.bfloat16(), bias, (7,), eps=1e-3)


def row(*values: float) -> Tensor:
    return torch.tensor([values])


_random = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_random)


# What other implementations got wrong (the numbers are of their public threads).
BUG_INPUTS = {
    "mean far from 0 (pytorch#51102)": (normal(5, 4) + 2000, (4,)),
    "little spread (pytorch#40307)": (normal(5, 4) * 0.01 + 100, (4,)),
    "widths that are no power of two (Liger#518)": (normal(1, 1, 1023), (1023,)),
    "wider than a block (flash-attention#120)": (normal(3, 12289), (12289,)),
    "each row at its own level (quack 9310d47)": (normal(3, 769) + 1000 + 100 * torch.arange(3)[:, None], (769,)),
    "more than two dimensions (FlagGems#5392)": (normal(2, 3, 4), (4,)),
    "two normalized dimensions (pytorch#193016)": (normal(40, 8, 16), (8, 16)),
    "three (FlagGems#5392)": (normal(2, 3, 4), (2, 3, 4)),
    "no rows (flash-attention#1620)": (torch.empty(3, 0, 8), (8,)),
    "no rows, two dimensions": (torch.empty(0, 5), (5,)),
    "no columns": (torch.empty(5, 0), (0,)),
    "one dimension (quack#16)": (normal(6), (6,)),
    "65536 rows (apex#411)": (row(1, -1, 2, -2) + 0.1 * normal(65537, 4), (4,)),
    "transposed (unsloth#10617)": (normal(8, 4).t(), (8,)),
    "a window (vllm#24247)": (normal(4, 16)[:, :8], (8,)),
    "1e19, whose square fp32 just holds (pytorch#178123)": (row(1e19, -1e19, 1e19, 0.0), (4,)),
}


@each_kind
@pytest.mark.parametrize("case", BUG_INPUTS)
def test_bug_inputs_of_other_projects(backend, device, kind, case) -> None:
    x, shape = BUG_INPUTS[case]
    weight, bias = parameters(shape, torch.float32, device)
    ulps = 6.0
    if kind == "layer_norm" and x.numel() > 0:  # rounding a mean to fp32 costs as many ulp as it is deviations from 0
        rows = x.reshape(-1, weight.numel())
        ulps += (rows.mean(1).abs() / rows.std(1)).max().item()
    check(kind, x.to(device), None, weight, bias, shape, ulps=ulps)


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(backend, device, kind, layout) -> None:
    base, other = torch.randn(2, 4, 3, 6, 40, generator=torch.Generator().manual_seed(0)).to(device).unbind()
    weight, bias = parameters((40,), torch.float32, device)
    x = laid_out(base, layout)
    if layout != "stride 0":  # rows without any spread: their derivative is infinite but for eps
        check(kind, x, None, weight, bias, (40,), ulps=4)
        check(kind, x, other, weight, bias, (40,), ulps=4)
    check(kind, other, None, weight, bias, (40,), dy=x, ulps=4)
    check(kind, other, x, weight, bias, (40,), dy=x, ulps=4)


@each_kind
def test_gradient_of_a_sum(backend, device, kind) -> None:
    """It arrives expanded, with strides of 0."""
    x = torch.randn(2, 6, 16, device=device, requires_grad=True)
    weight, bias = (p.requires_grad_() for p in parameters((16,), torch.float32, device))
    call(kind, x, None, weight, bias, (16,))[0].sum().backward()
    x_hat = exact_call(kind, x.detach().cpu().double(), None, None, None, (16,))[0]
    assert_close(weight.grad, x_hat.sum((0, 1)), 8)
    if kind == "layer_norm":
        assert torch.equal(bias.grad, torch.full_like(bias, 12.0))


@each_kind
def test_rows_of_60000_in_fp16(backend, device, kind) -> None:
    x = 60000 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).sign().to(device).half()
    weight, bias = parameters((64,), torch.float16, device)
    check(kind, x, None, weight, bias, (64,))


@each_kind
def test_no_gradient_that_is_not_asked_for(backend, device, kind, monkeypatch) -> None:
    asked = []
    plan = norms.Plan
    backward = plan.backward
    monkeypatch.setattr(plan, "backward", lambda *a, **k: asked.append(a[-1]) or backward(*a, **k))
    for wanted in ({"x"}, {"residual"}, {"weight"}, {"x", "weight"}, {"weight", "bias"}):
        weight, bias = parameters((8,), torch.float32, device)
        tensors = {"x": torch.randn(3, 8, device=device), "residual": torch.randn(3, 8, device=device)}
        tensors |= {"weight": weight, "bias": bias}
        for name in wanted:
            tensors[name].requires_grad_()
        y, summed = call(kind, *tensors.values(), (8,))
        y.sum().backward()
        for name, tensor in tensors.items():
            assert (tensor.grad is not None) == (name in wanted and not (name == "bias" and kind == "rms_norm"))
        assert asked[-1] == (
            bool(wanted & {"x", "residual"}), "weight" in wanted, kind == "layer_norm" and "bias" in wanted
        )  # fmt: skip


@each_kind
def test_one_of_the_two_outputs(backend, device, kind) -> None:
    """summed alone: its gradient passes as it is, and the weight, which it does not depend on, has none."""
    x, residual, dy = torch.randn(3, 4, 8, device=device).unbind()
    x, residual = x.clone().requires_grad_(), residual.clone().requires_grad_()
    weight, _ = parameters((8,), torch.float32, device)
    weight.requires_grad_()
    _, summed = call(kind, x, residual, weight, None, (8,))
    summed.backward(dy)
    assert torch.equal(x.grad, dy) and torch.equal(residual.grad, dy) and weight.grad is None
    assert x.grad.data_ptr() != residual.grad.data_ptr() and x.grad.data_ptr() != dy.data_ptr()


@each_kind
def test_backward_twice_and_inputs_untouched(backend, device, kind) -> None:
    x = torch.randn(5, 33, device=device, requires_grad=True)
    weight, _ = parameters((33,), torch.float32, device)
    weight.requires_grad_()
    dy = torch.randn(5, 33, device=device)
    before = x.detach().clone(), dy.clone()
    (y,) = call(kind, x, None, weight, None, (33,))
    y.backward(dy, retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    y.backward(dy)
    assert torch.equal(x.grad, 2 * once[0]) and torch.equal(weight.grad, 2 * once[1])
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])


@each_kind
def test_a_row_does_not_depend_on_those_beside_it(backend, device, kind) -> None:
    """pytorch#149301: the same row alone and in a batch, bit for bit."""
    x = torch.randn(70, 129, device=device)
    (whole,) = call(kind, x, None, None, None, (129,))
    for i in (0, 1, 69):
        assert torch.equal(call(kind, x[i : i + 1], None, None, None, (129,))[0], whole[i : i + 1])


@each_kind
def test_the_rounded_sum_is_what_is_normalised(backend, device, kind) -> None:
    for dtype in dtypes_of(backend):
        x, residual = (1 + torch.randn(2, 5, 300)).to(device, dtype).unbind()
        weight, bias = parameters((300,), dtype, device)
        y, summed = call(kind, x, residual, weight, bias, (300,))
        assert torch.equal(summed, x + residual)
        assert torch.equal(y, call(kind, summed, None, weight, bias, (300,))[0])


@each_kind
def test_residual_of_another_dtype_is_added_as_by_plus(backend, device, kind) -> None:
    x, residual = torch.randn(3, 8, device=device).half(), torch.randn(3, 8, device=device)
    y, summed = call(kind, x, residual, None, None, (8,))
    assert y.dtype == torch.float32 and torch.equal(summed, x + residual)
    x.requires_grad_()
    call(kind, x, residual, None, None, (8,))[1].sum().backward()
    assert x.grad.dtype == torch.float16


@each_kind
@pytest.mark.parametrize("memory_efficient", (False, True))
def test_derivatives_of_every_kind(backend, device, kind, memory_efficient) -> None:
    needs_fp64(backend)
    options = {"memory_efficient": memory_efficient}
    x, residual = torch.randn(2, 3, 2, 4, dtype=torch.double, device=device).unbind()
    weight, bias = parameters((2, 4), torch.double, device)

    def plain(x, weight, bias):
        return call(kind, x, None, weight, bias, (2, 4), **options)

    def added(x, residual, weight):
        return call(kind, x, residual, weight, None, (2, 4), **options)

    def bare(x):
        return call(kind, x, None, None, None, (2, 4), **options)

    tensors = (x, weight, bias) if kind == "layer_norm" else (x, weight)
    for f, given in (
        (plain if kind == "layer_norm" else lambda x, weight: plain(x, weight, None), tensors),
        (added, (x, residual, weight)),
        (bare, (x,)),
    ):
        given = tuple(t.clone().requires_grad_() for t in given)
        checks = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
        assert torch.autograd.gradcheck(f, given, **checks)
        assert torch.autograd.gradgradcheck(f, given, check_fwd_over_rev=True, check_rev_over_rev=True)


@each_kind
def test_function_transforms(backend, device, kind) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 8, generator=generator).to(device)
    weights = torch.rand(6, 8, generator=generator).to(device) + 0.5
    weight, bias = parameters((8,), torch.float32, device)

    def ours(x, weight):
        return call(kind, x, None, weight, bias, (8,))[0].pow(3)

    def torchs(x, weight):
        return exact_call(kind, x, None, weight, bias if kind == "layer_norm" else None, (8,))[0].pow(3)

    def both(transform):
        torch.testing.assert_close(transform(ours), transform(torchs), rtol=1e-3, atol=1e-3)

    def sum_of(f):
        return lambda *t: f(*t).sum()

    both(lambda f: torch.vmap(f, (1, None), 1)(x, weight))
    both(lambda f: torch.vmap(f)(x, weights))  # an ensemble
    both(lambda f: torch.func.grad(sum_of(f), (0, 1))(x, weight))
    both(lambda f: torch.vmap(torch.func.grad(sum_of(f)), (0, None))(x, weight))
    both(lambda f: torch.vmap(torch.func.grad(sum_of(f), (0, 1)), (0, None))(x, weight))  # a gradient a sample
    both(lambda f: torch.func.jvp(f, (x, weight), (x, weight)))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        both(lambda f, transform=transform: transform(lambda x: f(x, weight).sum((0, 1)))(x[:1]))


@each_kind
@pytest.mark.parametrize("compiler", ("eager", "aot_eager"))
def test_compile_fullgraph(backend, device, kind, compiler) -> None:
    torch._dynamo.reset()
    norm, add = (memkern.nn.LayerNorm, memkern.nn.AddLayerNorm) if kind == "layer_norm" else (
        memkern.nn.RMSNorm, memkern.nn.AddRMSNorm)  # fmt: skip
    first, second, third = add(8).to(device), norm(8, memory_efficient=True).to(device), norm(8, 1e-6).to(device)

    def f(x, residual):
        y, summed = first(2 * x, residual)
        return second(y) + third(summed)

    inputs = [t.requires_grad_() for t in torch.randn(2, 4, 5, 8, device=device).unbind()]
    wanted = [*inputs, *first.parameters(), *second.parameters(), *third.parameters()]
    dy = torch.randn(4, 5, 8, device=device)
    expected = f(*inputs)
    y = torch.compile(f, fullgraph=True, backend=compiler)(*inputs)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))


@each_kind
def test_export(backend, device, kind) -> None:
    layer = (memkern.nn.LayerNorm if kind == "layer_norm" else memkern.nn.RMSNorm)(8).to(device)
    x = torch.randn(3, 8, device=device)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    longer = torch.cat([x, -x])
    torch.testing.assert_close(program.module()(longer), layer(longer))


@each_kind
def test_no_data(kind) -> None:
    """Meta and fake tensors."""
    for options in ({}, {"memory_efficient": True}):
        layer = (memkern.nn.LayerNorm if kind == "layer_norm" else memkern.nn.RMSNorm)(4, device="meta", **options)
        x = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        assert (y.dtype, y.shape, y.device.type) == (x.dtype, x.shape, "meta")
        y.sum().backward()
        assert x.grad.shape == x.shape and layer.weight.grad.shape == (4,)
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(3, 4, requires_grad=True)
        call(kind, x, x, None, None, (4,))[0].sum().backward()
        assert x.grad.shape == (3, 4)

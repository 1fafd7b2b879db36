"""The softmax ops on every backend: their numbers against fp64, any shape, dimension and layout.

The functions, modules and derivatives built on them are in test_softmax_layers.py, masks in
test_softmax_masks.py, dropout in test_softmax_dropout.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from memkern import ops
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, needs_fp64
from tests.softmax_cases import (
    INF,
    assert_gradient,
    assert_log_probabilities,
    assert_probabilities,
    backward,
    exact_forward,
    forward,
    random,
    wide,
)
from tests.ulp import all_patterns

# Around the limits between the ways of going through a row.
SHORT = (1, 2, 31, 32, 33, 64, 127, 129, 513, 1023, 1024, 1025)
WIDTHS = (*SHORT, 2047, 2048, 2049, 4095, 4096, 4097, 8200, 16392, 70_000)


def fp32_and_halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(dtype) for dtype in (*HALVES, torch.float32)]


@pytest.mark.parametrize("log", (False, True), ids=("softmax", "log"))
def test_every_width_to_130(backend, device, log) -> None:
    """Megatron-LM#132, bigscience#61: rows below 128 were wrong. 5 rows: no multiple of what a block takes."""
    for width in range(1, 131):
        x = (4 * random(5, width, seed=width)).to(device, torch.bfloat16 if width % 2 else torch.float16)
        dy = random(5, width, seed=-width).to(x)
        y, _ = forward(backend, x, log=log)
        (assert_log_probabilities if log else assert_probabilities)(y, exact_forward(x, log=log))
        assert_gradient(backward(backend, dy, y, log=log), dy, y, log=log)


@pytest.mark.parametrize("log", (False, True), ids=("softmax", "log"))
def test_widths(backend, device, log) -> None:
    for dtype, width in itertools.product((*HALVES, torch.float32), WIDTHS):
        x, dy = (3 * random(2, 3, width)).to(device, dtype)
        y, dropped = forward(backend, x, log=log)
        assert y.dtype == dtype and dropped.numel() == 0
        (assert_log_probabilities if log else assert_probabilities)(y, exact_forward(x, log=log))
        assert_gradient(backward(backend, dy, y, log=log), dy, y, log=log)


def test_a_row_of_262144(backend, device) -> None:
    x, dy = random(2, 1, 2**18).to(device, torch.bfloat16)
    y, _ = forward(backend, x)
    assert_probabilities(y, exact_forward(x))
    assert_gradient(backward(backend, dy, y), dy, y)


def test_every_fp16_value_in_and_out(backend, device) -> None:
    """Subnormal ones, too: read as they are, and rounded to nearest even."""
    x = all_patterns(torch.float16)
    x = x[x.isfinite()].view(-1, 31).to(device)
    y, _ = forward(backend, x, scale=64.0, log=True, dtype=torch.float32)
    assert_log_probabilities(y, exact_forward(x, scale=64.0, log=True))
    halfway = (x.float()[:, :-1] + x.float()[:, 1:]) / 2  # of neighbours
    nothing = torch.full_like(halfway, -INF)
    for g in (halfway, halfway * (1 + 2**-20), halfway * 2**-12):
        dx = backward(backend, g, nothing, log=True, dtype=torch.float16)
        assert torch.equal(dx, g.half())


def test_fp64(backend, device) -> None:
    needs_fp64(backend)
    for width, log in itertools.product((1, 7, 130, 1025, 16392), (False, True)):
        x, dy = random(2, 3, width).to(device, torch.float64)
        y, _ = forward(backend, x, log=log, scale=0.7)
        exact = exact_forward(x, log=log, scale=0.7)
        (assert_log_probabilities if log else assert_probabilities)(y, exact)
        assert_gradient(backward(backend, dy, y, log=log, scale=0.7), dy, y, log=log, scale=0.7)


def test_rows_sum_to_one(backend, device) -> None:
    for width in (1, 5, 64, 1000, 4097, 16392, 70_000, 2**18):
        for x in fp32_and_halves(random(2, width).to(device)):
            y, _ = forward(backend, x)
            assert ((wide(y).sum(-1) - 1).abs() <= torch.finfo(x.dtype).eps * width**0.5).all()


@pytest.mark.parametrize("to_fp32", (False, True), ids=("own dtype", "fp32"))
def test_scale_and_dtype(backend, device, to_fp32) -> None:
    """The scale is not rounded to the input's dtype; fp32 of a 16-bit input is not rounded on the way."""
    for dtype, scale, width in itertools.product(HALVES, (0.1, -1 / 3, 0.0, 1000.1), (40, 1030, 16392)):
        out = torch.float32 if to_fp32 else dtype
        x = random(3, width).to(device, dtype)
        dy = random(3, width, seed=1).to(device, out)
        for log in (False, True):
            y, _ = forward(backend, x, scale=scale, log=log, dtype=out)
            assert y.dtype == out
            exact = exact_forward(x, scale=scale, log=log)
            if log:
                assert_log_probabilities(y, exact)
            else:
                assert_probabilities(y, exact, exponents=abs(scale) * 8)
            dx = backward(backend, dy, y, scale=scale, log=log, dtype=dtype)
            assert dx.dtype == dtype
            assert_gradient(dx, dy, y, scale=scale, log=log)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


# What other implementations got wrong (the numbers are of their public threads): input, exact result.
BUG_INPUTS = {
    "1e14, compiled (pytorch#163932)": (row(1e14, 1e14, 0.0), torch.float32),
    "the ends of fp16": (row(65504, 65504, -65504), torch.float16),
    "scores below -10000": (row(-20000, -30000, -10000), torch.float16),
    "infinities": (row(-INF, 1, -INF, 2), torch.float32),
    "one finite entry": (row(-INF, -3, -INF), torch.bfloat16),
    "nothing but -inf (pytorch#25110)": (row(-INF, -INF), torch.float32),
    "inf": (row(INF, 1, INF), torch.float32),
    "NaN": (row(0, 1, torch.nan), torch.float16),
    "5 rows of 50 (DeepSpeed#785)": (random(1, 1, 5, 50), torch.float16),
    "5 rows of 8193 (DeepSpeed#2636)": (random(1, 1, 5, 8193), torch.float16),
}


@pytest.mark.parametrize("case", BUG_INPUTS)
def test_bug_inputs_of_other_projects(backend, device, case) -> None:
    values, dtype = BUG_INPUTS[case]
    x = values.to(device, dtype)
    dy = random(*x.shape).to(x)
    y, _ = forward(backend, x)
    assert_probabilities(y, exact_forward(x), exponents=1)
    assert_gradient(backward(backend, dy, y), dy, y)


def test_log_softmax_far_from_zero(backend, device) -> None:
    """pytorch#38839: the shift is not lost."""
    x = torch.tensor([[-1e7, -1e7 + 1], [1e7, 1e7 + 1]], device=device)
    y, _ = forward(backend, x, log=True)
    torch.testing.assert_close(wide(y), torch.tensor([[-1.3132617, -0.3132617]] * 2).double(), rtol=1e-6, atol=0)
    assert torch.equal(forward(backend, x.new_tensor([[-INF, 0.0]]), log=True)[0].cpu(), row(-INF, 0.0))


def test_rows_that_are_not_finite_stay_alone(backend, device) -> None:
    for width in (9, 1025, 16392):
        x = random(5, width).to(device)
        x[1, 3], x[2, 5], x[3] = torch.nan, INF, -INF
        y, _ = forward(backend, x)
        assert y[1:4].isnan().all()
        dx = backward(backend, torch.ones_like(y), y)
        assert dx[1:4].isnan().all()
        for good in (0, 4):
            alone, _ = forward(backend, x[good : good + 1])
            assert torch.equal(y[good : good + 1], alone) and dx[good].isfinite().all()


@pytest.mark.parametrize("log", (False, True), ids=("softmax", "log"))
def test_any_dimension(backend, device, log) -> None:
    """pytorch#84144: every dimension, odd sizes of what is inside it and outside."""
    small = [(3, 5, 7, 9), (2, 33, 4, 1), (1, 130, 1, 40), (2, 1, 3, 64)]
    for shape in (*small, (4, 1025, 2), (2049, 3), (9000, 33), (70_000, 2)):
        for dim, dtype in itertools.product(range(len(shape)), (torch.float16, torch.float32)):
            if max(shape) > 5000 and (dim != 0 or dtype == torch.float32):
                continue
            x, dy = random(2, *shape).to(device, dtype)
            y, _ = forward(backend, x, dim=dim, scale=0.8, log=log)
            exact = exact_forward(x, dim=dim, scale=0.8, log=log)
            (assert_log_probabilities if log else assert_probabilities)(y, exact)
            assert_gradient(backward(backend, dy, y, dim, 0.8, log=log), dy, y, dim, 0.8, log)


def test_inner_dimension_edges(backend, device) -> None:
    x = random(3, 6, 4).to(device)
    x[0, :, 1], x[1, 2, 2], x[1, 3, 3], x[2, :5, 0], x[2, 1:, 1] = -INF, torch.nan, INF, -INF, -INF
    y, _ = forward(backend, x, dim=1)
    assert_probabilities(y, exact_forward(x, dim=1))
    y, _ = forward(backend, x, dim=1, zero_masked=True)
    assert_probabilities(y, exact_forward(x, dim=1, zero_masked=True))
    halves = x.half()
    y, _ = forward(backend, halves, dim=0, dtype=torch.float32)
    assert y.dtype == torch.float32
    assert_probabilities(y, exact_forward(halves, dim=0))
    dy = random(3, 6, 4).to(y)
    dx = backward(backend, dy, y, dim=0, dtype=torch.float16)
    assert dx.dtype == torch.float16
    assert_gradient(dx, dy, y, dim=0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3, 0, 8), (1,), (2, 3, 4)], ids=str)
def test_shapes(backend, device, shape) -> None:
    """FlagGems#5501: a division by the number of nothing."""
    x = random(*shape).to(device)
    for dim in range(x.dim()):
        y, _ = forward(backend, x, dim=dim)
        assert_probabilities(y, exact_forward(x, dim=dim))
        assert backward(backend, x, y, dim=dim).shape == shape
    causal, _ = forward(backend, x[None], x[None] > 0, causal=True, zero_masked=True)
    assert causal.shape == (1, *shape)


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_layouts(backend, device, dim) -> None:
    """x and dy in every layout: the same bits as from contiguous copies, and a contiguous result."""
    for width, dtype, layout in itertools.product((5, 64), (torch.float16, torch.float32), LAYOUTS):
        x, dy = (laid_out(t, layout) for t in random(2, 4, 6, width).to(device, dtype))
        y, _ = forward(backend, x, dim=dim)
        assert y.is_contiguous() and torch.equal(y, forward(backend, x.contiguous(), dim=dim)[0])
        dx = backward(backend, dy, y, dim=dim)
        assert dx.is_contiguous() and torch.equal(dx, backward(backend, dy.contiguous(), y, dim=dim))
        other = laid_out(y, layout)
        torch.testing.assert_close(
            backward(backend, dy, other, dim=dim), backward(backend, dy, other.contiguous(), dim=dim)
        )


def test_alignment(backend, device) -> None:
    """Each tensor at every distance from a 16-byte boundary, where rows would fit one."""
    for dtype, offset, which in itertools.product((torch.bfloat16, torch.float32), (1, 3, 4, 7), range(3)):
        values = [t.to(device, dtype) for t in random(3, 3, 64)]
        given = list(values)
        moved = torch.cat([values[which].new_zeros(offset), values[which].flatten()])[offset:]
        given[which] = moved.view(3, 64)
        results = []
        for x, mask, dy in (values, given):
            y, _ = forward(backend, x, mask)
            results.append((y, backward(backend, dy, y)))
        for value, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, value)


def test_more_than_65535_rows(backend, device) -> None:
    x = random(65_537, 3).to(device)
    y, _ = forward(backend, x)
    assert_probabilities(y, exact_forward(x))
    assert_gradient(backward(backend, x, y), x, y)
    across, _ = forward(backend, x.view(65_537, 3, 1).expand(-1, -1, 2), dim=1)
    assert torch.equal(across[..., 0], across[..., 1])
    assert_probabilities(across[..., 1].contiguous(), exact_forward(x))


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"log": True}, {"dim": 0}), ids=str)
def test_backward_over_the_gradient(backend, device, options) -> None:
    for dtype, width in itertools.product((torch.bfloat16, torch.float32), (5, 64, 1025, 16392)):
        x, dy = random(2, 3, width).to(device, dtype)
        y, _ = forward(backend, x, **options)
        expected = backward(backend, dy, y, scale=0.5, **options)
        before = y.clone()
        order = (options.get("dim", 1), 0.5, options.get("causal", False), options.get("log", False), 0.0, None)
        assert ops.op(backend, "softmax_backward_")(dy, y, *order) is None
        assert torch.equal(dy, expected) and torch.equal(y, before)


def test_runs_repeat_and_threads_do_not_matter(backend, device) -> None:
    x, dy = random(2, 3000, 72).to(device, torch.bfloat16)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y, _ = forward(backend, x)
            across, _ = forward(backend, x, dim=0)
            results.append((y, backward(backend, dy, y), across, backward(backend, dy, across, dim=0)))
    finally:
        torch.set_num_threads(threads)
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))


def test_a_row_does_not_depend_on_those_beside_it(backend, device) -> None:
    x = random(70, 129).to(device)
    y, _ = forward(backend, x)
    for i in (0, 1, 69):
        assert torch.equal(forward(backend, x[i : i + 1])[0], y[i : i + 1])


def test_opcheck(backend, device) -> None:
    for dtype, out in ((torch.float32, torch.float32), (torch.float16, torch.float32)):
        x = random(2, 5, 16).to(device, dtype)
        mask = (random(5, 16) > 1).to(device).expand(x.shape)
        seed = torch.tensor(1, device=device)
        arguments = (x, mask, 2, 0.5, True, False, True, 0.2, seed, out)
        torch.library.opcheck(ops.op(backend, "softmax_forward"), arguments)
        torch.library.opcheck(
            ops.op(backend, "softmax_forward"), (x, None, 1, 1.0, False, True, False, 0.0, None, out)
        )
        y = torch.softmax(x.to(out), -1)
        order = (2, 0.5, True, False, 0.2, seed)
        torch.library.opcheck(ops.op(backend, "softmax_backward"), (y, y, *order, dtype))
        torch.library.opcheck(ops.op(backend, "softmax_backward_"), (y.clone(), y, *order))


def test_bad_arguments(backend, device) -> None:
    """What would read past an end, or is not served, raises; the functions check the rest (test_softmax_layers.py)."""
    x = random(4, 6).to(device)
    y, _ = forward(backend, x)
    for options in ({"mask": x}, {"causal": True}, {"dropout": 0.5, "seed": torch.tensor(1, device=device)}):
        with pytest.raises((RuntimeError, ValueError), match="log"):
            forward(backend, x, log=True, **options)
    if backend not in ("cpu", "cuda", "emulated"):
        return
    op = ops.op(backend, "softmax_forward")
    for wrong in (x[:3] > 0, x[0] > 0, x.view(3, 8) > 0):
        with pytest.raises(RuntimeError, match="mask: needs"):
            op(x, wrong, 1, 1.0, False, False, False, 0.0, None, x.dtype)
    for wrong in (x.int(), x.double()):
        with pytest.raises(RuntimeError, match="mask: needs"):
            op(x, wrong, 1, 1.0, False, False, False, 0.0, None, x.dtype)
    for dim in (2, -3):
        with pytest.raises(RuntimeError, match="dim: got"):
            op(x, None, dim, 1.0, False, False, False, 0.0, None, x.dtype)
    with pytest.raises(RuntimeError, match="dtype: needs"):
        forward(backend, x, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="seed: dropout needs one int64"):
        forward(backend, x, dropout=0.5)
    with pytest.raises(RuntimeError, match="causal: needs"):
        forward(backend, x, dim=0, causal=True)
    for wrong in (x[:3], x.half(), x.view(3, 8), x[None]):
        with pytest.raises(RuntimeError, match="dy: needs"):
            backward(backend, wrong, y)
    with pytest.raises(RuntimeError, match="dy: needs"):
        ops.op(backend, "softmax_backward_")(x[:, ::2], y[:, ::2].contiguous(), 1, 1.0, False, False, 0.0, None)

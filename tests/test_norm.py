"""The ops of LayerNorm and RMSNorm on every backend: their numbers against fp64 formulas, any shape, bytes moved.

The functions, modules and derivatives built on them are in test_norm_layers.py and test_norm_modules.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from memkern import ops
from tests.layouts import LAYOUTS, laid_out
from tests.norm_cases import HALVES, dtypes_of, each_kind
from tests.ulp import spacing

WIDTHS = (1, 2, 5, 7, 129, 769, 1023, 3584, 8193, 70_000)


def forward(backend: str, kind: str, x, residual=None, weight=None, bias=None, eps=1e-5, zero_centred=False):
    """y, summed and the statistics; the columns are those of the last dimension."""
    if kind == "layer_norm":
        return ops.op(backend, "layer_norm_forward")(x, residual, weight, bias, x.shape[-1], eps)
    return ops.op(backend, "rms_norm_forward")(x, residual, weight, x.shape[-1], eps, zero_centred)


def backward(backend: str, kind: str, dy, x, statistics, weight=None, bias=None, dsummed=None, from_y=False,
             zero_centred=False, need_dx=True):  # fmt: skip
    """dx, dweight and dbias (None for RMSNorm), as far as there is a weight and a bias."""
    needs = need_dx, weight is not None
    if kind == "layer_norm":
        arguments = (dy, dsummed, x, weight, bias, *statistics, x.shape[-1], from_y, *needs, bias is not None)
        return ops.op(backend, "layer_norm_backward")(*arguments)
    arguments = (dy, dsummed, x, weight, *statistics, x.shape[-1], zero_centred, from_y, *needs)
    return *ops.op(backend, "rms_norm_backward")(*arguments), None


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().cpu().double()


def exact_forward(kind: str, x, weight=None, bias=None, eps=1e-5):
    """y, mean and rstd in fp64, on the values of the arguments."""
    x = wide(x)
    mean = x.mean(-1, keepdim=True) if kind == "layer_norm" else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (x - mean) * rstd * (1 if weight is None else wide(weight)) + (0 if bias is None else wide(bias))
    return y, mean, rstd


def exact_backward(kind: str, dy, x, weight=None, eps=1e-5):
    """dx, dweight and dbias in fp64."""
    y, _, rstd = exact_forward(kind, x, eps=eps)
    dy = wide(dy)
    g = dy if weight is None else dy * wide(weight)
    dx = g - y * (g * y).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if kind == "layer_norm" else dx) * rstd
    return dx, (dy * y).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)


def ulps_at_row_scale(actual: Tensor, exact: Tensor) -> Tensor:
    """The error in ulp of max(|value|, rms of its row)."""
    scale = torch.maximum(exact.abs(), exact.square().mean(-1, keepdim=True).sqrt())
    return (wide(actual) - exact).abs() / spacing(scale, actual.dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROWS = {
    "plain": lambda width: random(3, width),
    "mean 1000 times the spread": lambda width: 1000 + random(3, width),
    "spread of a thousandth": lambda width: 1e-3 * random(3, width),
    "the ends of fp16": lambda width: torch.where(random(3, width) < 0, -6e4, 6e4),
    "each row at its own level": lambda width: random(3, width) + 1000 + 100 * torch.arange(3)[:, None],
}


@each_kind
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_output_within_one_ulp(backend, device, kind, dtype, rows) -> None:
    """8 ulp in fp32, where storage and arithmetic are as wide."""
    for width in WIDTHS:
        x = ROWS[rows](width).to(device, dtype)
        weight, bias = (0.5 + random(2, width).abs()).to(device, dtype)
        bias = bias if kind == "layer_norm" else None
        y, _, *statistics = forward(backend, kind, x, None, weight, bias)
        exact, mean, rstd = exact_forward(kind, x, weight, bias)
        assert y.dtype == dtype and all(s.dtype == torch.float32 and s.shape == (3,) for s in statistics)
        error = ulps_at_row_scale(y, exact).max()
        limit = 1 if dtype in HALVES else 8
        assert error <= limit, f"{error:.2f} ulp at width {width}"
        torch.testing.assert_close(wide(statistics[-1]), rstd.flatten(), rtol=4e-6, atol=0)
        if kind == "layer_norm":
            torch.testing.assert_close(wide(statistics[0]), mean.flatten(), rtol=1e-6, atol=1e-6 * wide(x).abs().max())


@each_kind
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("parameters", ("weight", "fp32 weight", "none"))
def test_gradients(backend, device, kind, dtype, parameters) -> None:
    """dx within 1 ulp, weight gradients (fp32 sums, rounded once) too."""
    for rows, width in ((1, 1), (5, 2), (70, 7), (9, 64), (40, 129), (17, 1024), (5, 3584), (3, 8193), (2, 16384)):
        x, dy = random(2, rows, width).to(device, dtype)
        weight = bias = None
        if parameters != "none":
            of = torch.float32 if parameters.startswith("fp32") else dtype
            weight, bias = (0.5 + random(2, width).abs()).to(device, of)
            bias = bias if kind == "layer_norm" else None
        _, _, *statistics = forward(backend, kind, x, None, weight, bias, eps=1e-2)
        dx, dweight, dbias = backward(backend, kind, dy, x, statistics, weight, bias)
        exact = exact_backward(kind, dy, x, weight, eps=1e-2)
        if width > 2:  # else dx is what rounding leaves of 0
            error = ulps_at_row_scale(dx, exact[0]).max()
            assert error <= 1, f"dx: {error:.2f} ulp at {rows} x {width}"
        for name, parameter, gradient, value in (
            ("weight", weight, dweight, exact[1]),
            ("bias", bias, dbias, exact[2]),
        ):
            if parameter is None:
                assert gradient is None or gradient.numel() == 0
                continue
            assert gradient.dtype == parameter.dtype and gradient.shape == parameter.shape
            tolerance = torch.finfo(parameter.dtype).eps + 2e-6
            torch.testing.assert_close(wide(gradient), value, rtol=tolerance, atol=tolerance * rows**0.5, msg=name)


@pytest.mark.parametrize("rows", (16, 65_600))
def test_weight_gradients_of_many_rows_are_as_good_as_of_few(backend, device, rows) -> None:
    """The error grows no faster than sqrt(rows), as do the sums themselves: a constant number of ulp of fp32."""
    x, dy = random(2, rows, 8).to(device)
    weight, bias = torch.ones(2, 8, device=device)
    _, _, *statistics = forward(backend, "layer_norm", x, None, weight, bias)
    _, dweight, dbias = backward(backend, "layer_norm", dy, x, statistics, weight, bias, need_dx=False)
    _, *exact = exact_backward("layer_norm", dy, x, weight)
    for gradient, value in zip((dweight, dbias), exact, strict=True):
        error = (wide(gradient) - value).abs() / (torch.finfo(torch.float32).eps * rows**0.5)
        assert error.max() <= 8


def test_ones_add_up_exactly(backend, device) -> None:
    """In bf16 a sum of ones stops at 256."""
    x = random(4096, 8).to(device, torch.bfloat16)
    weight, bias = torch.ones(2, 8, device=device, dtype=torch.bfloat16)
    _, _, *statistics = forward(backend, "layer_norm", x, None, weight, bias)
    _, _, dbias = backward(backend, "layer_norm", torch.ones_like(x), x, statistics, weight, bias)
    assert dbias.tolist() == [4096.0] * 8


@each_kind
def test_residual(backend, device, kind) -> None:
    """summed is what PyTorch's + gives, y its norm; dsummed is added to dx before the one rounding."""
    for dtype, width in itertools.product(dtypes_of(backend), (3, 64, 1030, 8193)):
        x, residual, dy, dsummed = random(4, 6, width).to(device, dtype)
        weight = (0.5 + random(width).abs()).to(device, dtype)
        y, summed, *statistics = forward(backend, kind, x, residual, weight)
        assert torch.equal(summed, x + residual)
        again = forward(backend, kind, summed, None, weight)
        assert torch.equal(y, again[0]) and again[1].numel() == 0
        dx, *_ = backward(backend, kind, dy, summed, statistics, weight, dsummed=dsummed)
        exact = exact_backward(kind, dy, summed, weight)[0] + wide(dsummed)
        error = ulps_at_row_scale(dx, exact).max()
        assert error <= (1 if dtype in HALVES else 8 if dtype == torch.float32 else 64), f"{error:.2f} ulp at {width}"


@each_kind
def test_from_y(backend, device, kind) -> None:
    """Gradients from y alone: those of the x_hat that y holds."""
    for dtype, width in itertools.product(dtypes_of(backend), (7, 64, 1030, 3000, 8193)):
        y, dy = random(2, 5, width).to(device, dtype)
        weight, bias = (0.5 + random(2, width).abs()).to(device, dtype)
        bias = bias if kind == "layer_norm" else None
        rstd = 0.5 + random(5, seed=1).abs().to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        statistics = (torch.full_like(rstd, torch.nan), rstd) if kind == "layer_norm" else (rstd,)
        dx, dweight, dbias = backward(backend, kind, dy, y, statistics, weight, bias, from_y=True)
        x_hat = (wide(y) - (0 if bias is None else wide(bias))) / wide(weight)
        g = wide(dy) * wide(weight)
        exact = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
        exact = (exact - g.mean(-1, keepdim=True) if kind == "layer_norm" else exact) * wide(rstd)[:, None]
        limit = 1 if dtype in HALVES else 16
        assert ulps_at_row_scale(dx, exact).max() <= limit
        for gradient, value in ((dweight, (wide(dy) * x_hat).sum(0)), (dbias, wide(dy).sum(0))):
            if gradient is not None:
                tolerance = limit * torch.finfo(dtype).eps
                torch.testing.assert_close(wide(gradient), value, rtol=tolerance, atol=4 * tolerance)


def test_zero_centred_weight(backend, device) -> None:
    """The row is scaled by 1 + weight, added in the arithmetic: a small weight in 16 bits is not lost to the 1."""
    for dtype, width in itertools.product(dtypes_of(backend), (7, 1030, 8193)):
        x, dy = random(2, 4, width).to(device, dtype)
        weight = (1e-3 * random(width)).to(device, dtype)
        y, _, *statistics = forward(backend, "rms_norm", x, None, weight, zero_centred=True)
        dx, dweight, _ = backward(backend, "rms_norm", dy, x, statistics, weight, zero_centred=True)
        scale = 1 + wide(weight)
        limit = 1 if dtype in HALVES else 16
        assert ulps_at_row_scale(y, exact_forward("rms_norm", x, scale)[0]).max() <= limit
        exact = exact_backward("rms_norm", dy, x, scale)
        assert ulps_at_row_scale(dx, exact[0]).max() <= limit
        tolerance = limit * torch.finfo(dtype).eps
        torch.testing.assert_close(wide(dweight), exact[1], rtol=tolerance, atol=4 * tolerance)


@each_kind
def test_rows_that_are_not_finite_stay_alone(backend, device, kind) -> None:
    x = random(4, 9).to(device)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    weight = torch.ones(9, device=device)
    y, _, *statistics = forward(backend, kind, x, None, weight)
    assert y[1].isnan().all() and y[2, 5].isnan()
    dx, dweight, _ = backward(backend, kind, torch.ones_like(x), x, statistics, weight)
    assert dx[1].isnan().all() and dx[2].isnan().any()
    for good in (0, 3):
        alone = forward(backend, kind, x[good : good + 1], None, weight)[0]
        assert torch.equal(y[good : good + 1], alone) and dx[good].isfinite().all()
    assert dweight.isnan().any()


def test_constant_rows(backend, device) -> None:
    """Nothing is left of them but the bias, however the mean was rounded; with eps 0 they are 0/0, as in PyTorch."""
    for width in (3, 7, 100, 1030, 8193):
        x = torch.tensor([[0.1], [3.3e4], [-1e-3]], device=device).expand(3, width)
        bias = torch.full((width,), 0.25, device=device)
        y = forward(backend, "layer_norm", x, None, None, bias)[0]
        assert (y - bias).abs().max() <= 1e-4
    eight = torch.full((2, 8), 3.0, device=device)
    assert forward(backend, "layer_norm", eight, eps=0.0)[0].isnan().all()
    assert torch.equal(forward(backend, "rms_norm", eight, eps=0.0)[0], torch.ones_like(eight))


@each_kind
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3, 0, 8), (2, 3, 4), (6,)], ids=str)
def test_shapes(backend, device, kind, shape) -> None:
    """No rows make zero weight gradients, not missing ones."""
    x = random(*shape).to(device)
    weight = torch.ones(shape[-1:], device=device)
    y, summed, *statistics = forward(backend, kind, x, x, weight)
    dx, dweight, _ = backward(backend, kind, x, summed, statistics, weight)
    assert y.shape == summed.shape == dx.shape == shape and dweight.shape == shape[-1:]
    rows = x.numel() // shape[-1] if shape[-1] else 0
    assert all(s.shape == (rows,) for s in statistics)
    if rows == 0:
        assert dweight.tolist() == [0.0] * shape[-1]


@each_kind
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_layouts(backend, device, kind, dtype) -> None:
    """x, residual and dy in every layout, also off a 16-byte boundary: the same answer as from contiguous copies."""
    for width, layout in itertools.product((5, 64, 1024), LAYOUTS):
        x, residual, dy, dsummed = (laid_out(t, layout) for t in random(4, 6, width).to(device, dtype))
        parameters = laid_out(random(3, width).to(device, dtype), layout)
        weight, bias = parameters[1], parameters[2] if kind == "layer_norm" else None
        found = forward(backend, kind, x, residual, weight, bias)
        found += backward(backend, kind, dy, found[1], found[2:], weight, bias, dsummed)
        x, residual, dy, dsummed, weight = (t.contiguous() for t in (x, residual, dy, dsummed, weight))
        expected = forward(backend, kind, x, residual, weight, bias)
        expected += backward(backend, kind, dy, expected[1], expected[2:], weight, bias, dsummed)
        for actual, value in zip(found, expected, strict=True):
            if value is not None:
                assert actual.is_contiguous()
                torch.testing.assert_close(actual, value, rtol=2e-3, atol=2e-3)


@each_kind
def test_alignment(backend, device, kind) -> None:
    """Each tensor at every distance from a 16-byte boundary, where rows would fit one."""
    width = 64
    for dtype, offset, which in itertools.product((torch.bfloat16, torch.float32), (1, 3, 4, 7), range(5)):
        values = [random(3, width, seed=i).to(device, dtype) for i in range(3)]
        values += [random(width, seed=i).to(device, dtype) for i in (3, 4)]
        moved = torch.cat([values[which].new_zeros(offset), values[which].flatten()])[offset:]
        given = list(values)
        given[which] = moved.view(values[which].shape)
        results = []
        for x, residual, dy, weight, bias in (values, given):
            bias = bias if kind == "layer_norm" else None
            found = forward(backend, kind, x, residual, weight, bias)
            results.append((*found, *backward(backend, kind, dy, found[1], found[2:], weight, bias)))
        for value, actual in zip(*results, strict=True):
            if value is not None:
                torch.testing.assert_close(actual, value)


@each_kind
def test_runs_repeat_and_threads_do_not_matter(backend, device, kind) -> None:
    x, dy = random(2, 3000, 72).to(device, torch.bfloat16)
    weight = torch.ones(72, device=device)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found = forward(backend, kind, x, None, weight)
            results.append((*found, *backward(backend, kind, dy, x, found[2:], weight)[:2]))
    finally:
        torch.set_num_threads(threads)
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))


@each_kind
def test_opcheck(backend, device, kind) -> None:
    for dtype, width in ((torch.float32, 5), (torch.float16, 16)):
        x = random(2, 3, width).to(device, dtype)
        weight = torch.ones(width, device=device)
        bias = torch.ones(width, device=device) if kind == "layer_norm" else None
        _, summed, *statistics = forward(backend, kind, x, x, weight, bias)
        parameters = (weight, bias) if kind == "layer_norm" else (weight,)
        option = () if kind == "layer_norm" else (True,)
        arguments = (x, x, *parameters, width, 1e-5, *option)
        torch.library.opcheck(ops.op(backend, f"{kind}_forward"), arguments)
        needs = (True,) * (len(parameters) + 1)
        arguments = (x, None, summed, *parameters, *statistics, width, *option, False, *needs)
        torch.library.opcheck(ops.op(backend, f"{kind}_backward"), arguments)


@each_kind
def test_bad_arguments(backend, device, kind) -> None:
    """What would read past an end raises; the functions check the rest (test_norm_modules.py)."""
    if backend not in ("cpu", "cuda", "emulated"):
        pytest.skip(f"{backend}: the functions check, and PyTorch's operations")
    x, weight = random(4, 6).to(device), torch.ones(6, device=device)
    _, _, *statistics = forward(backend, kind, x, None, weight)
    with pytest.raises(RuntimeError, match="weight: needs 6 elements"):
        forward(backend, kind, x, None, weight[:5])
    with pytest.raises(RuntimeError, match="weight: needs the dtype of x, or float32"):
        forward(backend, kind, x, None, weight.double())
    for wrong in (x[:3], x.half(), x.view(3, 8), x[None]):
        with pytest.raises(RuntimeError, match="residual: needs the shape"):
            forward(backend, kind, x, wrong, weight)
        with pytest.raises(RuntimeError, match="dy: needs the shape"):
            backward(backend, kind, wrong, x, statistics, weight)
        with pytest.raises(RuntimeError, match="dsummed: needs the shape"):
            backward(backend, kind, x, x, statistics, weight, dsummed=wrong)
    with pytest.raises(RuntimeError, match="rstd: needs 4 elements"):
        backward(backend, kind, x, x, [s[:3] for s in statistics], weight)
    arguments = (None, None, 5, 1e-5) if kind == "layer_norm" else (None, 5, 1e-5, False)
    with pytest.raises(RuntimeError, match="columns: got 5, which does not divide the 24 elements"):
        ops.op(backend, f"{kind}_forward")(x, None, *arguments)

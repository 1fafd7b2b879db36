"""Scores and masks so large that fp32 hardly tells them apart, on every backend."""

from __future__ import annotations

import itertools

import pytest
import torch

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

DTYPES = (*HALVES, torch.float32)
WIDTHS = (3, 300, 16_400)  # a way of going through a row each


def assert_right(backend: str, x, mask, scale: float, exact) -> None:
    y, _ = forward(backend, x, mask, scale=scale)
    # What is above the least number is above e^-100. In Triton's interpreter an fma rounds twice.
    assert_probabilities(y, exact, exponents=1000 if backend == "triton" else 200)


def test_rows_that_the_least_number_hides_are_uniform(backend, device) -> None:
    """As in PyTorch, where the scores are lost in the sum. Scores of 50 made e^50 of it, and of 100 NaN."""
    sizes = ((torch.float32, 100.0, 1.0), (torch.bfloat16, 1000.0, 0.3))
    for dtype, width, (kind, size, scale) in itertools.product(DTYPES, WIDTHS, sizes):
        x = (size * random(2, width)).to(device, dtype)
        x[0, 0], mask = size, torch.full((width,), torch.finfo(kind).min, device=device, dtype=kind)
        assert_right(backend, x, mask, scale, torch.full_like(x, 1 / width, dtype=torch.float64).cpu())
        mask[width // 2 :] = 0  # hidden in part only, scores decide among the others
        assert_right(backend, x, mask, scale, exact_forward(x, mask, scale=scale))


def test_what_an_additive_mask_leaves_of_the_scores(backend, device) -> None:
    """All of their digits up to 2^25, and from there on those of the fp32 sum (the reference has more)."""
    for dtype, width in itertools.product((torch.float16, torch.float32), WIDTHS):
        x, scale = (30 * random(3, width)).to(device, dtype), -0.3
        masks = torch.tensor([[-1e4], [-3.3e7], [3e7]], device=device).expand(x.shape)
        assert_right(backend, x, masks, scale, exact_forward(x, masks, scale=scale))
        masks = torch.tensor([[-1e9], [-1e12], [2e8]], device=device).expand(x.shape)
        z = wide(x) * scale + wide(masks)
        assert_right(backend, x, masks, scale, (z if backend == "reference" else z.float().double()).softmax(-1))
        # Across the limit: part of the row on either side of it.
        masks = (-3.3554432e7 + 8 * random(width, seed=3).to(device)).expand(x.shape)
        y, _ = forward(backend, x, masks, scale=scale)
        assert ((wide(y).sum(-1) - 1).abs() <= torch.finfo(dtype).eps * width**0.5).all()


@pytest.mark.parametrize("log", (False, True), ids=("softmax", "log"))
def test_large_scores_at_any_scale(backend, device, log) -> None:
    """x scale, rounded to its own size, was no upper bound of x scale."""
    check = assert_log_probabilities if log else assert_probabilities
    cases = itertools.product(zip(DTYPES, (4e3, 1e14, 1e11), strict=True), (0.3, -0.7), (3, 2500), (0, 1))
    for (dtype, size), scale, width, dim in (*cases, ((torch.float32, 1e11), 0.3, 16_400, 1)):
        x = size * random(2, width).to(device)
        x[0, 0], x[0, 1] = -size, x[0].max()
        x = x.to(dtype) if dim == 1 else x.t().to(dtype)
        y, _ = forward(backend, x, dim=dim, scale=scale, log=log)
        check(y, exact_forward(x, dim=dim, scale=scale, log=log))
        dy = random(*x.shape).to(x)
        assert_gradient(backward(backend, dy, y, dim, scale, log=log), dy, y, dim, scale, log)
    y, _ = forward(backend, torch.tensor([[3e38, 1e38, -3e38]], device=device), scale=10.0, log=log)
    assert y[0].tolist() == [0.0, -INF, -INF] if log else y[0].tolist() == [1.0, 0.0, 0.0]


def test_large_scores_in_fp64(backend, device) -> None:
    needs_fp64(backend)
    for scale, width in itertools.product((0.3, -0.1), WIDTHS):
        x = 1e30 * random(2, width).to(device).double()
        x[0, 0] = 1e30
        y, _ = forward(backend, x, scale=scale)
        assert torch.equal(y.argmax(-1), (scale * x).argmax(-1)) and y.max(-1).values.eq(1).all() and y.min() == 0
        log, _ = forward(backend, x, scale=scale, log=True)
        torch.testing.assert_close(log, exact_forward(x, scale=scale, log=True).to(device), rtol=1e-14, atol=1e16)
        least = torch.full((width,), torch.finfo(torch.float32).min, device=device)
        y, _ = forward(backend, 50 * random(2, width).to(device).double(), least)
        torch.testing.assert_close(y, torch.full_like(y, 1 / width))

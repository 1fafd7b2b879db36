"""The gradient of an additive mask that requires one: summed in fp32, in parts, and rounded once."""

from __future__ import annotations

import itertools

import pytest
import torch

from memkern.functional import scaled_masked_softmax
from tests.peak import peak_bytes
from tests.softmax_cases import live_keys, random

SHAPES = ((3, 6, 9), (9,), (2, 1, 1, 1), (2, 1, 6, 1), (2, 3, 6, 9))


@pytest.mark.parametrize("dropout", (0.0, 0.4))
@pytest.mark.parametrize("chunk", (20, 150, 2**22))  # elements: two rows, two heads of three, all
def test_against_fp64(backend, device, monkeypatch, chunk, dropout) -> None:
    monkeypatch.setattr("memkern.functional.softmax_autograd.CHUNK", chunk)
    x, dy = random(2, 2, 3, 6, 9).to(device)
    kinds = ((torch.float16, "bottom_right"), (torch.float32, None), (torch.float32, "bottom_right"))
    for (dtype, causal), shape in itertools.product(kinds, SHAPES):
        scores, gradient = x.to(dtype), dy.to(dtype)
        bias = random(*shape, seed=5).to(device).requires_grad_()
        options = {"scale": 0.5, "causal": causal, "dropout": dropout}
        torch.manual_seed(1)
        dropped = scaled_masked_softmax(scores, bias, **options)
        (found,) = torch.autograd.grad(dropped, bias, gradient)
        p = scaled_masked_softmax(scores, bias.detach(), 0.5, causal=causal).double()
        g = torch.where(dropped > 0, gradient.double() / (1 - dropout), 0)
        g = torch.where(live_keys(scores).to(device), g, 0) if causal else g
        exact = (p * (g - (p * g).sum(-1, keepdim=True))).sum_to_size(bias.shape)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=2e-6)


def test_over_many_rows(backend, device) -> None:
    """Rounded to 16 bits element by element, it was off by 2^-12, and gradients below 6e-8 were lost."""
    x, dy = random(2, 4096, 64).to(device).half()
    bias = torch.zeros(64, device=device, requires_grad=True)
    y = scaled_masked_softmax(x, bias)
    y.backward(dy)
    p, g = y.detach().double(), dy.double()
    exact = (p * (g - (p * g).sum(-1, keepdim=True))).sum(0)
    assert (bias.grad.double() - exact).norm() < 1e-6 * exact.norm()
    few = torch.zeros(4, device=device, requires_grad=True)
    dy = torch.zeros(1000, 4, device=device).half()
    dy[:, 0] = 1e-7
    scaled_masked_softmax(torch.zeros_like(dy), few).backward(dy)
    torch.testing.assert_close(few.grad, dy[0].float() * 1000 * 0.25 - float(dy[0, 0]) * 1000 / 16)


def test_no_temporary_of_full_size(monkeypatch) -> None:
    monkeypatch.setattr("memkern.functional.softmax_autograd.CHUNK", 2**18)
    x = random(64, 2**17).half()
    bias, dy = torch.zeros(2**17, requires_grad=True), torch.ones_like(x)
    y = scaled_masked_softmax(x, bias)
    assert peak_bytes(lambda: y.backward(dy)) <= 7 * 2**20  # 3 MiB of chunks, and bias.grad, of x's 16


def test_one_dimension_and_nothing(backend, device) -> None:
    for shape in ((8,), (0, 8), (8, 0), (0,)):
        x = random(*shape).to(device).half().requires_grad_()
        bias = torch.zeros(shape[-1:], device=device, requires_grad=True)
        scaled_masked_softmax(x, bias).sum().backward()
        assert bias.grad.shape == bias.shape and bias.grad.abs().sum() < 1e-3
    one = torch.zeros(1, device=device, requires_grad=True)
    scaled_masked_softmax(random(8).to(device), one).sum().backward()
    assert abs(one.grad.item()) < 1e-6


def test_second_derivative(backend, device) -> None:
    x, dy = random(2, 4, 6).to(device)
    bias = random(6, seed=1).to(device).requires_grad_()
    (first,) = torch.autograd.grad((scaled_masked_softmax(x, bias) * dy).sum(), bias, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), bias)
    wide = bias.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(((x.double() + wide).softmax(-1) * dy).sum(), wide, create_graph=True)
    torch.testing.assert_close(
        second.double(), torch.autograd.grad(first.square().sum(), wide)[0], rtol=1e-4, atol=1e-6
    )

"""The GELU cases of the benchmarks: what they count and what they compute."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks import gelu, harness

CPU = torch.device("cpu")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gelu_bytes_are_those_of_its_tensors(device, quick):
    cases = gelu.cases(device, quick)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        x = dy = y = dx = torch.empty(case.shape, dtype=case.dtype, device="meta").nbytes
        forward, backward = x + y, dy + x + dx
        assert case.bytes == {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]


def test_the_issues_figure_is_among_the_cases():
    for quick in (False, True):
        labels = [case.label for case in gelu.cases("cpu", quick)]
        assert "erf 4M bf16 both" in labels and "erf 4M fp32 both" in labels


def gelu_and_slope(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """gelu(x) and gelu'(x) in fp64, from their textbook forms."""
    x = x.detach().double()
    if form == "erf":
        cumulative = (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * cumulative, cumulative + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return x * (1 + torch.tanh(u)) / 2, (1 + torch.tanh(u)) / 2 + x * (1 - torch.tanh(u) ** 2) * slope / 2


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize("form", ["erf", "tanh"])
@pytest.mark.parametrize("function_for", [gelu.baseline, gelu.fused])
def test_what_is_timed_computes_gelu(function_for, form, direction):
    case = gelu.case(form, 257, torch.float32, direction)
    torch.manual_seed(0)
    x, dy = gelu.inputs(case, CPU)
    call = harness.layer_call(case, function_for(case), (x, dy))
    y, slope = gelu_and_slope(x, form)
    for _ in range(2):  # a call is repeated as it is
        result = call()
        if direction == "forward":
            assert not result.requires_grad
            torch.testing.assert_close(result.double(), y, rtol=1e-5, atol=1e-6)
        else:
            if direction == "both":
                torch.testing.assert_close(result[0].double(), y, rtol=1e-5, atol=1e-6)
                result = result[1]
            torch.testing.assert_close(result[0].double(), dy.double() * slope, rtol=1e-5, atol=1e-6)
    assert x.grad is None, "gradients do not add up from call to call"

"""The norm cases of the benchmarks: what they count and what they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import harness, norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_those_of_the_tensors(device, quick) -> None:
    cases = norm.cases(device, quick)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        rows, hidden = case.shape
        large = torch.empty(case.shape, dtype=case.dtype, device="meta").nbytes
        small = torch.empty(hidden, dtype=case.dtype, device="meta").nbytes
        if case.form == "layer":  # x, weight, bias -> y, mean, rstd; dy, x, weight, both -> dx, dweight, dbias
            forward, backward = 2 * large + 2 * small + 8 * rows, 3 * large + 3 * small + 8 * rows
        elif case.form == "rms":
            forward, backward = 2 * large + small + 4 * rows, 3 * large + 2 * small + 4 * rows
        else:  # x, residual, ... -> y, summed, ...; dy, dsummed, summed, ... -> dx, ...
            forward, backward = 4 * large + 2 * small + 8 * rows, 4 * large + 3 * small + 8 * rows
        assert case.bytes == {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]


def test_the_issues_figures_are_among_the_cases() -> None:
    for quick in (False, True):
        labels = [case.label for case in norm.cases("cpu", quick)]
        for label in ("layer 4Kx1K bf16 both", "layer 4Kx1K fp32 both", "add layer 4Kx1K fp32 both"):
            assert label in labels
    hidden = {case.shape[1] for case in norm.cases("cuda", quick=False)}
    assert min(hidden) == 64 and max(hidden) == 262144


@pytest.mark.parametrize("direction", norm.DIRECTIONS)
@pytest.mark.parametrize("form", norm.FORMS)
@pytest.mark.parametrize("function_for", [norm.baseline, norm.fused])
def test_what_is_timed_computes_the_norm(function_for, form, direction) -> None:
    case = norm.case(form, 5, 33, torch.float32, direction)
    torch.manual_seed(0)
    inputs = norm.inputs(case, CPU)
    wide = [t.detach().double().requires_grad_() for t in inputs[:-1]]
    x = wide[0] + wide[1] if form == "add layer" else wide[0]
    parameters = wide[2:] if form == "add layer" else wide[1:]
    y = (F.rms_norm if form == "rms" else F.layer_norm)(x, (33,), *parameters, eps=norm.EPS)
    outputs = (y, x) if form == "add layer" else (y,)
    expected = torch.autograd.grad(outputs, wide, [inputs[-1].double()] * len(outputs))
    call = harness.layer_call(case, function_for(case), inputs)
    for _ in range(2):  # a call is repeated as it is
        result = call()
        found = () if direction == "backward" else result[0] if direction == "both" else result
        found = (found,) if isinstance(found, torch.Tensor) else found
        for actual, value in zip(found, outputs, strict=direction != "backward"):
            torch.testing.assert_close(actual.double(), value, rtol=1e-4, atol=1e-5)
        if direction != "forward":
            gradients = result[1] if direction == "both" else result
            for actual, value in zip(gradients, expected, strict=True):
                torch.testing.assert_close(actual.double(), value, rtol=1e-4, atol=1e-4)
    assert all(t.grad is None for t in inputs), "gradients do not add up from call to call"

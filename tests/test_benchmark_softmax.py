"""The softmax cases of the benchmarks: what they count and what they compute."""

from __future__ import annotations

import pytest
import torch

from benchmarks import harness, softmax

CPU = torch.device("cpu")
FORMS = (*softmax.ROWS, softmax.INNER, *softmax.ATTENTION)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_those_of_the_tensors(device, quick) -> None:
    cases = softmax.cases(device, quick)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        x = torch.empty(case.shape, dtype=case.dtype, device="meta")
        read, extra = x.nbytes, 0
        if case.form == "causal":  # 1 + 2 + ... + 1024 of 1024 x 1024 elements
            read = x.nbytes * 1025 // 2048
        if case.form in ("masked", "biased"):
            extra = x[0].numel() * (1 if case.form == "masked" else case.dtype.itemsize)
        if case.form == "dropout":
            extra = x.nbytes
        forward, backward = read + x.nbytes + extra, 2 * read + x.nbytes
        assert case.bytes == {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]


def test_the_issues_figures_are_among_the_cases() -> None:
    for quick in (False, True):
        labels = [case.label for case in softmax.cases("cpu", quick)]
        for label in ("softmax 4Kx1K bf16 both", "masked 4x1Kx1K bf16 both", "biased 4x1Kx1K bf16 both"):
            assert label in labels
    widths = {case.shape[1] for case in softmax.cases("cuda", quick=False)}
    assert min(widths) == 64 and max(widths) == 262144


@pytest.mark.parametrize("direction", softmax.DIRECTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_timed_computes_the_same(form, direction) -> None:
    case = softmax.case(form, (2, 6, 6) if form in softmax.ATTENTION else (6, 33), torch.float32, direction)
    inputs = softmax.inputs(case, CPU)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs[:-1]]
    wide[0].requires_grad_()
    y = softmax.baseline(case)(*wide)
    expected = torch.autograd.grad(y, wide[0], inputs[-1].double())
    for function_for in (softmax.baseline, softmax.fused):
        call = harness.layer_call(case, function_for(case), inputs)
        for _ in range(2):  # a call is repeated as it is
            result = call()
            value = result[0] if direction == "both" else result
            if form == "dropout":  # its numbers are its own
                values = value if isinstance(value, tuple) else (value,)
                assert all(v.isfinite().all() for v in values)
                continue
            if direction != "backward":
                torch.testing.assert_close(value.double(), y, rtol=1e-4, atol=1e-5)
            if direction != "forward":
                gradients = result[1] if direction == "both" else result
                torch.testing.assert_close(gradients[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    assert all(t.grad is None for t in inputs), "gradients do not add up from call to call"

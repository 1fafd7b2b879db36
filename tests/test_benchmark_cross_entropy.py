"""The cross-entropy cases of the benchmarks: what they count and what they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cross_entropy, harness

CPU = torch.device("cpu")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_those_of_the_tensors(device, quick) -> None:
    cases = cross_entropy.cases(device, quick)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        with torch._subclasses.FakeTensorMode():
            *tensors, dloss = cross_entropy.inputs(case, CPU)
        given = sum(t.nbytes for t in tensors)
        gradients = sum(t.nbytes for t in tensors if t.requires_grad)
        saved = 0 if case.form == "linear" else 4 * case.shape[0] * (2 if case.form == "distillation" else 1)
        forward, backward = given + saved + dloss.nbytes, given + saved + dloss.nbytes + gradients
        if case.form == "linear":  # in one pass
            assert case.bytes == given + gradients + dloss.nbytes
        else:
            assert case.bytes == {"forward": forward, "backward": backward, "both": forward + backward}[case.direction]


def test_the_issues_figures_are_among_the_cases() -> None:
    shapes = {(case.form, case.shape) for case in cross_entropy.cases("cpu", quick=False)}
    assert ("linear", (8192, 50_257, 768)) in shapes
    assert {case.form for case in cross_entropy.cases("cpu", quick=True)} == set(cross_entropy.FORMS)


@pytest.mark.parametrize("form", cross_entropy.FORMS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("function_for", [cross_entropy.baseline, cross_entropy.fused])
def test_what_is_timed_computes_the_loss(function_for, form, dtype) -> None:
    case = cross_entropy.case(form, (6, 50, 8)[: 3 if form == "linear" else 2], dtype, "both")
    torch.manual_seed(0)
    inputs = cross_entropy.inputs(case, CPU)
    wide = [t.detach().double() if t.is_floating_point() else t for t in inputs[:-1]]
    leaves = [t.requires_grad_() for t, given in zip(wide, inputs, strict=False) if given.requires_grad]
    if form == "distillation":
        log_p, log_t = (F.log_softmax(t / cross_entropy.TEMPERATURE, 1) for t in wide)
        loss = cross_entropy.TEMPERATURE**2 * F.kl_div(log_p, log_t, reduction="batchmean", log_target=True)
    else:
        loss = F.cross_entropy(wide[0] if form == "cross-entropy" else wide[0] @ wide[1].t(), wide[-1])
    expected = torch.autograd.grad(loss, leaves)
    call = harness.layer_call(case, function_for(case), inputs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for _ in range(2):  # a call is repeated as it is
        found, gradients = call()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), loss, **tolerance)
        for actual, value in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual.double(), value, **tolerance)
    assert all(t.grad is None for t in inputs), "gradients do not add up from call to call"

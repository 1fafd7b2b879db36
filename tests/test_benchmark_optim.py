"""The optimizer cases of the benchmarks: what they count and what they compute."""

from __future__ import annotations

import pytest
import torch

from benchmarks import optim
from benchmarks.harness import Case

CPU = torch.device("cpu")
STEPS = {"baseline": optim.FAMILY.baseline, "fused": optim.FAMILY.fused, **optim.FAMILY.peers}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_those_of_the_tensors(device, quick) -> None:
    """The gradient twice, parameter and two moments in and out."""
    cases = optim.cases(device, quick)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        with torch._subclasses.FakeTensorMode():
            tensors = optim.inputs(case, CPU)
        params, grads = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        assert [p.shape for p in params] == [g.shape for g in grads]
        assert all(p.requires_grad for p in params) and not any(g.requires_grad for g in grads)
        assert len(params) == (292 if case.form == "292 tensors" else 1)
        assert case.bytes == 2 * sum(g.nbytes for g in grads) + 2 * 3 * sum(p.nbytes for p in params)


def test_the_issues_figures_are_among_the_cases() -> None:
    assert [case.shape for case in optim.cases("cuda", quick=False)] == [(354_823_168,)] * 2
    assert (50_000_000,) in [case.shape for case in optim.cases("cpu", quick=False)]


@pytest.mark.parametrize("name", STEPS)
def test_what_is_timed_computes_the_same(name) -> None:
    """Two calls, as two steps of AdamW after clip_grad_norm_ by hand, from gradients that stay as they are."""
    case = Case("1 tensor", (1001,), torch.float32, "step", 32 * 1001)
    torch.manual_seed(0)
    p, grad = optim.inputs(case, CPU)
    exact, given = p.detach().double().requires_grad_(), grad.double()
    reference = torch.optim.AdamW([exact])
    call = optim.call(case, STEPS[name](case), (p, grad))
    for _ in range(2):
        p.grad.copy_(given)  # torch's clip scales it in place
        call()
        exact.grad = given.clone()
        torch.nn.utils.clip_grad_norm_([exact], optim.MAX_NORM)
        reference.step()
        torch.testing.assert_close(p.double(), exact, rtol=1e-6, atol=1e-7)

"""Other packages beside memkern in the benchmarks, with stand-ins for what is not installed here."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from benchmarks import cross_entropy
from tests.test_linear_cross_entropy import chain

SHAPES = {"cross-entropy": (6, 11), "distillation": (6, 11), "linear": (6, 11, 4)}


def over_the_logits(logits, target):
    """As liger-kernel's: what is read afterwards is no logits."""
    loss = F.cross_entropy(logits, target)
    logits.data.zero_()
    return loss


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("form", SHAPES)
def test_liger_gets_what_the_others_get(form, dtype, monkeypatch) -> None:
    """And what it writes over is its own."""
    functional = types.ModuleType("liger_kernel.transformers.functional")
    functional.liger_cross_entropy = over_the_logits
    functional.liger_kl_div = F.kl_div
    functional.liger_fused_linear_cross_entropy = lambda h, w, t: chain(h, w, None, t)
    transformers = types.ModuleType("liger_kernel.transformers")
    transformers.functional = functional
    for module in (types.ModuleType("liger_kernel"), transformers, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    case = cross_entropy.case(form, SHAPES[form], dtype, "both")
    *tensors, _ = cross_entropy.inputs(case, torch.device("cpu"))
    before = [t.detach().clone() for t in tensors]
    wanted = [t for t in tensors if t.requires_grad]
    losses = [function(case)(*tensors) for function in (cross_entropy.liger, cross_entropy.baseline)]
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, wanted) for loss in losses))


def test_the_case_of_a_gpt2_is_timed_in_full_runs() -> None:
    for device in ("cpu", "cuda"):
        shapes = [case.shape for case in cross_entropy.cases(device, quick=False) if case.form == "linear"]
        assert (8192, 50_257, 768) in shapes

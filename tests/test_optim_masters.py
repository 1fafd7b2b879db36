"""fp32 masters of 16-bit parameters across checkpoints: they follow the weights, whoever changed those."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from memkern.optim import AdamW
from tests.no_sync import no_sync
from tests.optim_tools import set_grad
from tests.test_optim_state import gradients, through_a_file, train


def with_masters(device: str, start: Tensor | None = None, masters: torch.dtype | None = torch.float32):
    """A bf16 parameter, and AdamW for it."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 7).to(device, torch.bfloat16) if start is None else start.clone())
    return p, AdamW([p], lr=0.1, master_weights=masters)


def train_as_fp32(p: Tensor, master: Tensor, optimizer: AdamW, steps: range) -> Tensor:
    """Train ``p``, and return the fp32 weight that the same steps make of ``master``, with the same states."""
    exact = torch.nn.Parameter(master.clone())
    alone = AdamW([exact], lr=0.1)
    alone.state[exact] = {key: value.detach().clone() for key, value in optimizer.state[p].items() if key != "master"}
    train(p, optimizer, steps)
    for grad in gradients(str(p.device), steps):
        exact.grad = grad.bfloat16().float()
        alone.step()
    assert torch.equal(optimizer.state[p]["master"], exact) and torch.equal(p, exact.bfloat16())
    return exact


def test_masters_through_torch(backend, device) -> None:
    """torch rounds them to bf16, and lets the parameter go on without: they are made anew, from the parameter."""
    p, ours = with_masters(device)
    train(p, ours, range(3))
    theirs = torch.optim.AdamW([p], lr=0.1)
    theirs.load_state_dict(through_a_file(ours.state_dict()))
    assert theirs.state[p]["master"].dtype == torch.bfloat16
    train(p, theirs, range(3, 6))
    q, back = with_masters(device, p.detach())
    back.load_state_dict(through_a_file(theirs.state_dict()))
    assert "master" not in back.state[q]
    train_as_fp32(q, q.detach().float(), back, range(6, 9))


@pytest.mark.parametrize("weights_first", (False, True))
def test_weights_from_elsewhere(backend, device, weights_first) -> None:
    """Before the checkpoint or after it, and in part: the master follows them, and stays where they are its own."""
    p, first = with_masters(device)
    train(p, first, range(3))
    weights = p.detach().clone()
    weights[:3] = torch.tensor([5.0, math.nan, -0.0])
    q, second = with_masters(device)
    if weights_first:
        q.data.copy_(weights)
    second.load_state_dict(through_a_file(first.state_dict()))
    if not weights_first:
        q.data.copy_(weights)
    set_grad(q, 0.0)
    master = torch.cat([weights[:3].float(), first.state[p]["master"][3:]])
    twin = copy.deepcopy(second)
    with no_sync(device):
        second.step()
    r = twin.param_groups[0]["params"][0]
    set_grad(r, 0.0)
    twin.step()
    for x, optimizer in ((q, second), (r, twin)):
        expected = torch.nn.Parameter(master.clone())
        alone = AdamW([expected], lr=0.1)
        alone.state[expected] = {k: v.clone() for k, v in first.state[p].items() if k != "master"}
        set_grad(expected, 0.0)
        alone.step()
        torch.testing.assert_close(optimizer.state[x]["master"], expected.detach(), rtol=0, atol=0, equal_nan=True)
    # Only at the first step: what is written into the parameter later on, the master does not see, as before.
    kept = second.state[q]["master"].clone()
    q.data.fill_(3.0)
    second.param_groups[0]["lr"] = 0.0
    second.step()
    torch.testing.assert_close(second.state[q]["master"], kept, rtol=0, atol=0, equal_nan=True)


def test_the_constructor_decides_on_masters(backend, device) -> None:
    p, first = with_masters(device)
    train(p, first, range(3))
    for dtype, masters in ((torch.bfloat16, None), (torch.float32, torch.float32), (torch.float32, None)):
        q = torch.nn.Parameter(p.detach().to(dtype))
        second = AdamW([q], lr=0.1, master_weights=masters)
        second.load_state_dict(through_a_file(first.state_dict()))
        assert set(second.state[q]) == {"exp_avg", "exp_avg_sq", "step"}
        before = q.detach().clone()
        train(q, second, range(3, 4))
        assert not torch.equal(q, before) and "master" not in second.state[q]

"""Two processes that share the parameters (FSDP2, gloo): one norm, and one rank's overflow skips on both."""

from __future__ import annotations

import copy
import math
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import memkern
from memkern.optim import LAMB, SGD, AdamW

RANKS = 2
OPTIMIZERS = {
    "AdamW": lambda params, **more: AdamW(params, lr=0.1, **more),
    "SGD": lambda params, **more: SGD(params, lr=0.1, momentum=0.9, **more),
}


def model() -> nn.Module:
    """Uneven shards: 3 rows over two ranks, and 1 row, of which the second rank has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step))


def backward(network: nn.Module, step: int, scale: float) -> None:
    (network(batch(step)).square().mean() * scale).backward()


def check_trajectory(rank: int, name: str, scaler_type: type) -> None:
    from torch.distributed.fsdp import fully_shard

    whole, sharded = model(), model()
    fully_shard(sharded)
    plain = OPTIMIZERS[name](whole.parameters(), max_grad_norm=0.05)
    split = OPTIMIZERS[name](sharded.parameters(), max_grad_norm=0.05)
    scaler = scaler_type("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for step in range(8):
        backward(sharded, step, scaler.get_scale())
        overflow = step in (0, 3)
        before = [p.to_local().clone() for p in sharded.parameters()]
        states = copy.deepcopy(
            [s.to_local() for state in split.state.values() for key, s in state.items() if key != "step"]
        )
        if overflow and rank == 0:
            next(sharded.parameters()).grad.to_local().view(-1)[1] = math.inf
        scaler.step(split)
        scale = scaler.get_scale()
        scaler.update()
        if overflow:
            assert all(torch.equal(p.to_local(), was) for p, was in zip(sharded.parameters(), before, strict=True))
            after = [s.to_local() for state in split.state.values() for key, s in state.items() if key != "step"]
            assert all(torch.equal(a, b) for a, b in zip(after, states, strict=bool(states)))
            assert scaler.get_scale() == scale / 2
        else:
            backward(whole, step, 1.0)
            plain.step()
            plain.zero_grad()
            torch.testing.assert_close(split.grad_norm, plain.grad_norm)
            for p, q in zip(sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.full_tensor(), q)
        split.zero_grad()
    assert int(split.skipped_steps) == 2
    assert scaler.get_scale() == 1.0


def check_beside_plain_parameters(rank: int, dtype: torch.dtype, clip: float | None) -> None:
    """One layer is split, the other one each rank has whole: an overflow in that, on one rank, is all ranks' too."""
    from torch.distributed.fsdp import fully_shard

    whole, mixed = model().to(dtype), model().to(dtype)
    fully_shard(mixed[0])
    arguments = {"max_grad_norm": clip, "master_weights": torch.float32}
    plain, split = (AdamW(network.parameters(), lr=0.1, **arguments) for network in (whole, mixed))
    scaler = memkern.amp.GradScaler("cpu", init_scale=4.0)  # torch's takes no mixture
    scaler.scale(torch.ones(()))
    for step in range(5):
        x = batch(step).to(dtype)
        (mixed(x).square().mean() * scaler.get_scale()).backward()
        if step in (0, 2):
            if rank == step // 2:
                mixed[2].weight.grad[0, 0] = math.inf
        else:
            whole(x).square().mean().backward()
            plain.step()
        scaler.step(split)
        scaler.update(4.0)
        assert int(split.skipped_steps) == (step + 2) // 2 if step < 3 else 2
        if clip and step not in (0, 2):
            torch.testing.assert_close(split.grad_norm, plain.grad_norm, rtol=1e-2, atol=0)
        for p, q in zip(mixed.parameters(), whole.parameters(), strict=True):
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            torch.testing.assert_close(value, q, rtol=0.05, atol=0.02)
            if split.state[p] and dtype != torch.float32:
                assert split.state[p]["master"].dtype == torch.float32
        split.zero_grad()
        plain.zero_grad()
    values = [torch.empty_like(mixed[2].weight) for _ in range(RANKS)]
    dist.all_gather(values, mixed[2].weight.detach())
    assert torch.equal(*values)


def check_resume(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    networks = [model() for _ in range(2)]
    for network in networks:
        fully_shard(network)
    first, second = (AdamW(network.parameters(), lr=0.1) for network in networks)
    for step in range(2):
        backward(networks[0], step, 1.0)
        first.step()
        first.zero_grad()
    networks[1].load_state_dict(networks[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for network, optimizer in zip(networks, (first, second), strict=True):
        backward(network, 2, 1.0)
        optimizer.step()
    for p, q in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        assert isinstance(second.state[q]["exp_avg"], DTensor)
    bias = list(networks[0].parameters())[1]
    bias.grad = bias.grad.redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match=r"gradient of parameter 1 of group 0: got shape \(3,\), needs \([12],\)"):
        first.step()
    with pytest.raises(TypeError, match="params: got a DTensor, needs plain tensors"):
        LAMB(networks[0].parameters())


CHECKS = {
    f"{name} under {scaler.__module__.split('.')[0]}": (check_trajectory, name, scaler)
    for name in OPTIMIZERS
    for scaler in (memkern.amp.GradScaler, torch.amp.GradScaler)
}
CHECKS |= {
    f"plain parameters beside, {dtype}": (check_beside_plain_parameters, dtype, clip)
    for dtype, clip in ((torch.float32, None), (torch.bfloat16, 1.0))
}
CHECKS["resume"] = (check_resume,)


def process(rank: int, port: int, failures) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for name, (check, *arguments) in CHECKS.items():
        try:
            check(rank, *arguments)
        except Exception:
            failures.put((name, rank, traceback.format_exc()))
            break  # the ranks are no longer in step
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch.distributed has no gloo here"
)
def test_two_processes() -> None:
    context = mp.get_context("spawn")
    failures = context.SimpleQueue()
    mp.spawn(process, (free_port(), failures), nprocs=RANKS)
    assert failures.empty(), "\n".join(map(str, failures.get()))

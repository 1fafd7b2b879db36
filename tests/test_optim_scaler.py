"""memkern.amp: the scaler beside torch's, learning rates across skipped steps, and a step without a host sync."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import memkern
from memkern.amp import GradScaler, step_scheduler
from memkern.optim import SGD, AdamW
from tests.optim_tools import parameter, same_bits, set_grad, snapshot


def test_no_closure(scaler, device) -> None:
    p = parameter(device)
    optimizer = AdamW([p])
    set_grad(p, 1.0)
    for arguments, keywords in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, *arguments, **keywords)
    assert torch.equal(p, torch.ones_like(p)) and len(optimizer.state) == 0


def test_several_optimizers(scaler, device, make_optimizer) -> None:
    """Each skips for its own gradients; the scale backs off for all."""
    params = [parameter(device) for _ in range(3)]
    optimizers = [make_optimizer([p]) for p in params]
    for p, value in zip(params, (4.0, math.inf, 4.0), strict=True):
        set_grad(p, value)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [int(optimizer.skipped_steps) for optimizer in optimizers] == [0, 1, 0]
    assert scaler.get_scale() == 2
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizers[0])
        scaler.step(optimizers[0])


def test_disabled_scaler(backend, device, make_optimizer) -> None:
    scaler = memkern.amp.GradScaler(device, enabled=False)
    p, q = parameter(device), parameter(device)
    optimizer, alone = make_optimizer([p]), make_optimizer([q])
    for x in (p, q):
        set_grad(x, 1.0)
    assert scaler.scale(3.0) == 3.0
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    alone.step()
    assert same_bits(snapshot(optimizer), snapshot(alone))


def test_foreign_optimizers_under_our_scaler(backend, device) -> None:
    scaler = memkern.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    for make in (lambda p: torch.optim.AdamW(p), lambda p: torch.optim.AdamW(p, fused=True)):
        p = parameter(device)
        optimizer = make([p])
        set_grad(p, math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, torch.ones_like(p))
        set_grad(p, 4.0)
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(p, torch.ones_like(p))


def test_checkpoints_of_scalers(backend, device) -> None:
    """They go both ways, with the growth tracker, after overflows."""
    ours, theirs = GradScaler(device, growth_interval=3), torch.amp.GradScaler(device, growth_interval=3)
    p, q = parameter(device), parameter(device)
    optimizers = (AdamW([p]), torch.optim.AdamW([q]))
    pairs = list(zip((ours, theirs), (p, q), optimizers, strict=True))

    def step(value: float) -> None:
        for scaler, x, optimizer in pairs:
            scaler.scale(torch.ones((), device=device))
            set_grad(x, value)
            scaler.step(optimizer)
            scaler.update()

    for value in (math.inf, 1.0, 1.0, 1.0, math.nan, 1.0):
        step(value)
        assert ours.state_dict() == theirs.state_dict()
    exchanged = GradScaler(device), torch.amp.GradScaler(device)
    exchanged[0].load_state_dict(theirs.state_dict())
    exchanged[1].load_state_dict(ours.state_dict())
    pairs = list(zip(exchanged, (p, q), optimizers, strict=True))
    for value in (1.0, 1.0, math.inf):
        step(value)
        assert exchanged[0].state_dict() == exchanged[1].state_dict()
    assert exchanged[0].state_dict() != ours.state_dict()
    assert pickle.loads(pickle.dumps(exchanged[0])).state_dict() == exchanged[0].state_dict()


def test_one_pass_over_the_gradients(backend, device, monkeypatch) -> None:
    """Our scaler's check is the optimizer's: check_and_norm runs once a step, and gradients are not written."""
    calls = []
    op = memkern.ops.op
    monkeypatch.setattr(memkern.ops, "op", lambda backend, name: calls.append(name) or op(backend, name))
    scaler = GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    a, b = parameter(device), parameter(device, n=3)
    optimizer = AdamW([{"params": [a]}, {"params": [b], "lr": 0.1}], max_grad_norm=1.0)
    set_grad(a, 4.0)
    set_grad(b, 4.0)
    versions = a.grad._version, b.grad._version
    scaler.step(optimizer)
    assert calls == ["check_and_norm", "advance", "adamw_step", "adamw_step"]
    assert (a.grad == 4).all() and float(optimizer.grad_norm) == pytest.approx(math.sqrt(8))
    assert versions == (0, 0)


def test_unscaled_gradients_are_written_where_asked(scaler, device, make_optimizer) -> None:
    p = parameter(device)
    optimizer = make_optimizer([p], write_unscaled_grads=True, max_grad_norm=0.1)
    set_grad(p, 8.0)
    scaler.step(optimizer)
    assert (p.grad == 2).all()
    scaler.update()
    set_grad(p, math.inf)
    scaler.step(optimizer)
    assert (p.grad == math.inf).all()


def test_schedules_do_not_drift(backend, device) -> None:
    """A schedule of 10 steps ends after 10 steps taken, whatever was skipped among them."""
    scaler = GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    p = parameter(device)
    optimizer = SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10)
    taken = 0
    for i in range(30):
        skip = i in (0, 1, 4, 7)
        set_grad(p, math.inf if skip else 0.0)
        scaler.step(optimizer)
        scaler.update()
        step_scheduler(scheduler, optimizer)
        if device == "cuda":
            torch.cuda.synchronize()
            continue
        taken += not skip
        assert optimizer.param_groups[0]["lr"] == pytest.approx(max(0.0, 1 - taken / 10), abs=1e-9)
    assert scheduler.last_epoch == 26
    scheduler.state_dict()  # nothing of ours in it
    assert not any("memkern" in key or "skip" in key for key in scheduler.state_dict())
    with pytest.raises(TypeError, match=r"optimizer: got SGD, needs an optimizer of memkern\.optim"):
        step_scheduler(scheduler, torch.optim.SGD([p]))


@pytest.mark.parametrize("how", ("checkpoint", "the same optimizer", "pickle"))
def test_schedules_do_not_drift_across_a_checkpoint(backend, device, how) -> None:
    """The skips before it are none that a loaded schedule has to be held back for."""
    p = parameter(device)
    optimizer = SGD([p], lr=1.0, max_grad_norm=math.inf)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=100)

    def train(p, optimizer, scheduler, skips: tuple[bool, ...]) -> None:
        for skip in skips:
            set_grad(p, math.inf if skip else 0.0)
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            step_scheduler(scheduler, optimizer)

    train(p, optimizer, scheduler, (True, False, True, False, False))
    assert scheduler.last_epoch == 3
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    if how == "pickle":
        optimizer, scheduler = pickle.loads(pickle.dumps((optimizer, scheduler)))
        (p,) = optimizer.param_groups[0]["params"]
    elif how == "checkpoint":
        optimizer = SGD([p], lr=1.0, max_grad_norm=math.inf)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=100)
    else:
        train(p, optimizer, scheduler, (True, True, True))
    if how != "pickle":
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    train(p, optimizer, scheduler, (False, True, False))
    assert scheduler.last_epoch == 5 and int(optimizer.skipped_steps) == 3


class NoSync(TorchDispatchMode):
    """Raises where the host would have to wait for a GPU, also where the tensors happen to be on the CPU."""

    SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        if name in self.SYNCHRONISING or (name == "index" and arguments[1][0].dtype == torch.bool):
            raise AssertionError(f"host sync: {name}")
        return function(*arguments, **(keywords or {}))


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what runs below the dispatch mode (the reference ops)."""
    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__"):

        def forbidden(*arguments, name=name, **keywords):
            raise AssertionError(f"host sync: {name}")

        monkeypatch.setattr(Tensor, name, forbidden)


@pytest.mark.parametrize("clip", (None, 1.0))
def test_no_host_sync(scaler, backend, device, make_optimizer, clip, monkeypatch) -> None:
    a, b = parameter(device), parameter(device, n=0)
    h = parameter(device, dtype=torch.float16)
    optimizer = make_optimizer([a, b, h], max_grad_norm=clip, master_weights=torch.float32)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device=device)
    for value in (math.inf, 4.0, 4.0):
        for p in (a, b, h):
            set_grad(p, value)
        with monkeypatch.context() as patch, NoSync():
            forbid_reading(patch)
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            scaler.step(optimizer)
            scaler.update()
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert int(optimizer.skipped_steps) == 1 and not torch.equal(a, torch.ones_like(a))


def test_the_sync_test_catches_syncs(monkeypatch) -> None:
    x = torch.ones(3)
    for read in (
        lambda: x[0].item(),
        lambda: bool(x[0]),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
    ):
        with pytest.raises(AssertionError, match="host sync"), NoSync():
            read()
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        for read in (lambda: x.cpu(), lambda: x.tolist(), lambda: float(x[0]), lambda: x.numpy()):
            with pytest.raises(AssertionError, match="host sync"):
                read()
    # torch's own unfused path under its scaler does sync.
    p = parameter("cpu")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    set_grad(p, 1.0)
    with pytest.raises(AssertionError, match="host sync"), NoSync():
        scaler.step(torch.optim.AdamW([p]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graph(backend, device) -> None:
    if backend != "cuda":
        pytest.skip(f"{backend} is not captured here")
    p, q = parameter(device), parameter(device)
    lr = torch.tensor(0.1, device=device)
    captured, eager = AdamW([p], lr=lr, max_grad_norm=1.0), AdamW([q], lr=0.1, max_grad_norm=1.0)
    set_grad(p, 1.0)
    captured.step()  # makes the states
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    values = [1.0, 2.0, math.inf, 3.0]
    for value in values[1:]:
        p.grad.fill_(value)
        graph.replay()
    for value in values:
        set_grad(q, value)
        eager.step()
    assert same_bits(snapshot(captured), snapshot(eager)) and int(captured.skipped_steps) == 1

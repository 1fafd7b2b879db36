"""memkern.amp: the scaler beside torch's, learning rates across skipped steps, and a step without a host sync."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memkern
from memkern.amp import GradScaler, step_scheduler
from memkern.optim import SGD, AdamW
from memkern.optim.check import on
from tests.no_sync import no_sync
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


@pytest.mark.parametrize("skips_before", ((), (False, True, True), (True, True, False)))
@pytest.mark.parametrize("beside_another", (False, True))
def test_a_schedule_that_begins_later(backend, device, skips_before, beside_another) -> None:
    """It is held back for the skips that it was there for, the first of which may be in its first step."""
    p = parameter(device)
    optimizer = SGD([p], lr=1.0, max_grad_norm=math.inf)
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer) for _ in range(3)]
    for i, skip in enumerate((*skips_before, True, False, True, False)):
        set_grad(p, math.inf if skip else 0.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        late = i >= len(skips_before)
        for scheduler in schedulers[:1] * beside_another + schedulers[1:] * late:
            step_scheduler(scheduler, optimizer)
    behind = 1 if device == "cuda" else 0  # of a skip in the very last step but one, the last call knows
    taken = 2 + len(skips_before) * beside_another - sum(skips_before) * beside_another
    assert schedulers[0].last_epoch == pytest.approx(taken if beside_another else 0, abs=behind)
    assert [s.last_epoch for s in schedulers[1:]] == pytest.approx([2, 2], abs=behind)


def test_schedules_of_two_optimizers(backend, device) -> None:
    """Under one scaler, which adds up what it found: the first one's schedule is not held back for the other's skip."""
    scaler = GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    params = [parameter(device) for _ in range(2)]
    optimizers = [SGD([p], lr=1.0) for p in params]
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in optimizers]
    for p, value in zip(params, (1.0, math.inf), strict=True):
        set_grad(p, value)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for scheduler, optimizer in zip(schedulers, optimizers, strict=True):
        step_scheduler(scheduler, optimizer)
    assert schedulers[0].last_epoch == 1 and (device == "cuda" or schedulers[1].last_epoch == 0)


def test_a_schedule_that_looks_at_a_metric(backend, device) -> None:
    p = parameter(device)
    optimizer = SGD([p], lr=1.0, max_grad_norm=math.inf)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss, skip in ((1.0, False), (2.0, True), (0.5, False), (0.75, False)):
        set_grad(p, math.inf if skip else 0.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        step_scheduler(scheduler, optimizer, loss)
    assert device == "cuda" or optimizer.param_groups[0]["lr"] == pytest.approx(0.1)  # only for 0.75 after 0.5


@pytest.mark.parametrize("every", (False, True))
def test_gradients_changed_by_a_step_hook(scaler, device, every) -> None:
    """A hook of this optimizer's, or of every optimizer's, which takes itself away: the check is of what it leaves."""
    handles = []
    for change, norm in ((lambda g: g.data.mul_(0.5), math.sqrt(5) / 2), (lambda g: g.fill_(math.inf), math.inf)):
        p = parameter(device)
        optimizer = SGD([p], lr=1.0, max_grad_norm=0.5)

        def hook(optimizer, *_, change=change, p=p):
            handles.pop().remove()
            change(p.grad)

        register = register_optimizer_step_pre_hook if every else optimizer.register_step_pre_hook
        handles.append(register(hook))
        set_grad(p, 4.0)
        scaler.step(optimizer)
        scaler.update(4.0)
        assert norm == math.inf or float(optimizer.grad_norm) == pytest.approx(norm)
        taken = 0.5 / math.sqrt(5) if norm < math.inf else 0.0
        torch.testing.assert_close(p, torch.full_like(p, 1 - taken))
        assert int(optimizer.skipped_steps) == (norm == math.inf)


def test_the_floor_raises_no_scale(backend, device) -> None:
    """One that was lower from the start, was set or was loaded stays where it is; only backing off stops."""
    p = parameter(device)
    optimizer = AdamW([p])
    low = 2.0**-20

    def scale_after(scaler: GradScaler, value: float) -> float:
        scaler.scale(torch.ones((), device=device))
        set_grad(p, value)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    begun, put, loaded = GradScaler(device, init_scale=low), GradScaler(device), GradScaler(device)
    put.scale(torch.ones((), device=device))
    put.update(low)
    loaded.load_state_dict(begun.state_dict())
    for scaler in (begun, put, loaded):
        assert [scale_after(scaler, value) for value in (1.0, math.inf, 1.0)] == [low] * 3
    growing = GradScaler(device, init_scale=low, growth_interval=1)
    assert [scale_after(growing, value) for value in (1.0, 1.0, math.inf)] == [2 * low, 4 * low, 4 * low]
    falling = GradScaler(device, init_scale=1.5, backoff_factor=0.5, min_scale=1.0)
    assert [scale_after(falling, math.inf) for _ in range(2)] == [1.0, 1.0]
    for bad in (math.inf, 0, math.nan):
        with pytest.raises(ValueError, match=f"min_scale: got {bad}, needs a finite number above 0"):
            GradScaler(device, min_scale=bad)


def test_the_norm_is_that_of_the_last_step(backend, device) -> None:
    p = parameter(device)
    optimizer = SGD([p], lr=0.1, max_grad_norm=1.0)
    set_grad(p, 1.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(5))
    optimizer.max_grad_norm = None
    optimizer.step()
    assert optimizer.grad_norm is None


def test_copies_to_the_cpu_are_waited_for() -> None:
    class Scalar:
        def to(self, *arguments, non_blocking):
            return arguments, non_blocking

    for device, non_blocking in (("cpu", False), ("cuda", True)):
        assert on(torch.device(device), Scalar()) == ((torch.device(device), torch.float32), non_blocking)


def test_the_count_of_skipped_steps_moves_with_the_model(backend, device) -> None:
    p = parameter(device)
    optimizer = SGD([p], lr=0.1, max_grad_norm=1.0)

    class Elsewhere:
        device = torch.device("meta")

        def to(self, device):
            return torch.tensor(3, device=device)

    optimizer.skipped_steps = Elsewhere()
    set_grad(p, math.inf)
    optimizer.step()
    assert optimizer.skipped_steps.device == p.device and int(optimizer.skipped_steps) == 4


@pytest.mark.parametrize("clip", (None, 1.0))
def test_no_host_sync(scaler, backend, device, make_optimizer, clip) -> None:
    a, b = parameter(device), parameter(device, n=0)
    h = parameter(device, dtype=torch.float16)
    optimizer = make_optimizer([a, b, h], max_grad_norm=clip, master_weights=torch.float32)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device=device)
    scheduler = torch.optim.lr_scheduler.LinearLR(SGD([parameter(device)]))
    for value in (math.inf, 4.0, 4.0):
        for p in (a, b, h):
            set_grad(p, value)
        with no_sync(device):
            scaler.step(optimizer)
            scaler.update()
            if device == "cuda":  # on the CPU it does read the count
                step_scheduler(scheduler, optimizer)
        if value == 4.0:  # a load, which may wait, and then a step, which may not
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert int(optimizer.skipped_steps) == 1 and not torch.equal(a, torch.ones_like(a))


@pytest.mark.parametrize(
    "read",
    (
        lambda x: x[0].item(),
        lambda x: bool(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", copy=True),
        lambda x: x.tolist(),
        lambda x: float(x[0]),
        lambda x: x.numpy(),
        # torch's own unfused path under its scaler
        lambda x: torch.amp.GradScaler._maybe_opt_step(None, None, {"found_inf_per_device": {"cpu": x[0]}}),
    ),
)
def test_the_sync_test_catches_syncs(read) -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="host sync"), no_sync("cpu"):
        read(x)


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

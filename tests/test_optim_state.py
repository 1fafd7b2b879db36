"""Checkpoints: to and from torch's optimizers, dtypes kept, and a resumed run that is the uninterrupted one."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor

import memkern
from memkern.optim import LAMB, SGD, Adam, AdamW, Lion
from tests.optim_tools import parameter, same_bits, set_grad, snapshot
from tests.test_optim_torch import PAIRS


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest):
    return PAIRS[request.param]


def through_a_file(state: dict, **keywords) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **keywords)


def gradients(device: str, steps: range) -> list[Tensor]:
    return [torch.randn(7, generator=torch.Generator().manual_seed(i)).to(device) for i in steps]


def train(p: Tensor, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for grad in gradients(str(p.device), steps):
        p.grad = grad.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("direction", ("torch to memkern", "memkern to torch", "there and back"))
def test_checkpoints_go_both_ways(backend, device, pair, direction) -> None:
    ours, theirs = pair
    chain = {
        "torch to memkern": (theirs, ours),
        "memkern to torch": (ours, theirs),
        "there and back": (ours, theirs, ours),
    }
    p, uninterrupted = parameter(device, n=7), parameter(device, n=7)
    state = None
    for i, kind in enumerate(chain[direction]):
        optimizer = kind([p])
        if state is not None:
            optimizer.load_state_dict(through_a_file(state))
        train(p, optimizer, range(3 * i, 3 * i + 3))
        state = optimizer.state_dict()
    reference = theirs([uninterrupted])
    train(uninterrupted, reference, range(3 * len(chain[direction])))
    torch.testing.assert_close(p, uninterrupted, rtol=1e-5, atol=1e-6)
    for key, value in reference.state_dict()["state"].get(0, {}).items():
        if value is not None:
            torch.testing.assert_close(state["state"][0][key].to(device), value.to(device), rtol=1e-5, atol=1e-7)
    ours_only = {"step"} if ours([p]).__class__ is SGD else set()
    assert set(state["state"].get(0, {})) - ours_only == set(reference.state_dict()["state"].get(0, {})) - ours_only
    assert list(state["param_groups"][0]) == list(reference.state_dict()["param_groups"][0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("masters", (None, torch.float32))
def test_resume_is_bit_identical(backend, device, make_optimizer, dtype, masters) -> None:
    """Also with a scaler that overflowed on the way, and gradients on which the rest depends."""

    def run(steps: range, p: Tensor, optimizer, scaler) -> None:
        scaler.scale(torch.ones((), device=device))
        for i, grad in zip(steps, gradients(device, steps), strict=True):
            p.grad = (grad * scaler.get_scale()).to(dtype)
            if i in (1, 4):
                p.grad[2] = math.inf
            scaler.step(optimizer)
            scaler.update()

    def start(value: Tensor | None = None):
        p = torch.nn.Parameter((torch.linspace(-1, 1, 7) if value is None else value).to(device, dtype))
        scaler = memkern.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
        return p, make_optimizer([p], max_grad_norm=1.0, master_weights=masters), scaler

    whole = start()
    run(range(8), *whole)
    first = start()
    run(range(3), *first)
    saved = through_a_file(
        {"p": first[0].detach(), "optimizer": first[1].state_dict(), "scaler": first[2].state_dict()}
    )
    resumed = start(saved["p"])
    resumed[1].load_state_dict(saved["optimizer"])
    resumed[2].load_state_dict(saved["scaler"])
    run(range(3, 8), *resumed)
    assert same_bits(snapshot(resumed[1]), snapshot(whole[1]))
    assert resumed[2].state_dict() == whole[2].state_dict()
    assert int(resumed[1].skipped_steps) == int(whole[1].skipped_steps) == 2
    assert all(state.get("master", whole[0]).dtype in (torch.float32, dtype) for state in resumed[1].state.values())


def test_states_keep_their_dtype(backend, device) -> None:
    """T12, T13: bf16 states of fp32 parameters are loaded as they are, and used; fp32 states of bf16 ones too."""
    for own, kept in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        p = parameter(device, n=7, dtype=own)
        optimizer = AdamW([p], lr=0.1)
        train(p, optimizer, range(2))
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key] = optimizer.state[p][key].to(kept)
        fresh = AdamW([p], lr=0.1)
        fresh.load_state_dict(through_a_file(optimizer.state_dict()))
        before = {key: value.clone() for key, value in fresh.state[p].items()}
        train(p, fresh, range(2, 3))
        for key in ("exp_avg", "exp_avg_sq"):
            assert fresh.state[p][key].dtype == kept == before[key].dtype
            assert not torch.equal(fresh.state[p][key], before[key])


def test_map_location_and_old_checkpoints(backend, device) -> None:
    """Steps saved on the CPU, as a number, or as fp64, and groups without the newer keys."""
    p = parameter(device, n=7)
    optimizer = AdamW([p])
    train(p, optimizer, range(2))
    for step in (torch.tensor(2.0), 2, 2.0, torch.tensor([2.0], dtype=torch.float64)):
        saved = through_a_file(optimizer.state_dict(), map_location="cpu")
        saved["state"][0]["step"] = step
        for key in ("foreach", "fused", "maximize", "amsgrad", "decoupled_weight_decay", "capturable"):
            del saved["param_groups"][0][key]
        q = torch.nn.Parameter(p.detach().clone())
        loaded, uninterrupted = AdamW([q]), copy.deepcopy(optimizer)
        loaded.load_state_dict(saved)
        assert all(value.device == q.device for value in loaded.state[q].values())
        assert loaded.state[q]["step"].dtype == torch.float32 and loaded.state[q]["step"].shape == ()
        train(q, loaded, range(2, 3))
        (twin,) = uninterrupted.param_groups[0]["params"]
        train(twin, uninterrupted, range(2, 3))
        assert torch.equal(q, twin)


def test_adamw_stays_decoupled(backend, device) -> None:
    """Whatever checkpoint its groups came from; Adam takes what the checkpoint says. As in torch."""
    p = parameter(device)
    for source, target, decoupled in ((Adam, AdamW, True), (AdamW, Adam, True), (Adam, Adam, False)):
        optimizer = target([p])
        optimizer.load_state_dict(source([p]).state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"] == decoupled


def test_loaded_states_lie_in_memory_as_the_parameter_does(backend, device) -> None:
    value = torch.randn(2, 3, 4, 5, device=device)
    a = torch.nn.Parameter(value.clone())
    b = torch.nn.Parameter(value.clone().to(memory_format=torch.channels_last))
    first, second = AdamW([a], lr=0.1), AdamW([b], lr=0.1)
    for p, optimizer in ((a, first), (b, second)):
        p.grad = value.cos()
        optimizer.step()
    second.load_state_dict(first.state_dict())
    assert second.state[b]["exp_avg"].stride() == b.stride()
    first.step()
    second.step()
    assert torch.equal(a, b)


def test_loading_copies(backend, device) -> None:
    """Two optimizers that exchanged a state_dict() do not share states."""
    a, b = parameter(device, n=7), parameter(device, n=7)
    first, second = AdamW([a]), AdamW([b])
    train(a, first, range(2))
    second.load_state_dict(first.state_dict())
    before = snapshot(first)
    train(b, second, range(2))
    assert same_bits(before, snapshot(first))


def test_hooks_see_and_change_what_is_loaded(backend, device) -> None:
    a, b = parameter(device, n=7), parameter(device, n=7)
    first, second = AdamW([a]), AdamW([b])
    train(a, first, range(2))

    def without_state(optimizer, state_dict):
        return {**state_dict, "state": {}}

    seen = []
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    second.load_state_dict(first.state_dict())
    second.register_load_state_dict_pre_hook(without_state)
    second.load_state_dict(first.state_dict())
    assert seen == [1, 0]


def test_the_count_of_skipped_steps_is_kept(backend, device) -> None:
    """In an entry that torch ignores, and that its checkpoints lack."""
    p, q = parameter(device, n=7), parameter(device, n=7)
    optimizer, torchs = AdamW([p], max_grad_norm=1.0), torch.optim.AdamW([q])
    for value in (math.inf, 1.0, math.nan):
        set_grad(p, value)
        optimizer.step()
    saved = through_a_file(optimizer.state_dict(), map_location="cpu")
    fresh = AdamW([p])
    fresh.load_state_dict(saved)
    count = fresh.skipped_steps
    assert int(count) == 2 and count.device == p.device and count.dtype == torch.int64
    torchs.load_state_dict(saved)
    assert set(torchs.state_dict()) == {"state", "param_groups"}
    fresh.load_state_dict(torchs.state_dict())
    assert int(count) == 0 and fresh.skipped_steps is count and int(optimizer.skipped_steps) == 2


def test_copies_and_pickles(backend, device, make_optimizer) -> None:
    p = parameter(device, n=7)
    optimizer = make_optimizer([p], max_grad_norm=0.5, master_weights=torch.float32, write_unscaled_grads=True)
    train(p, optimizer, range(2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (twin.max_grad_norm, twin.master_weights, twin.write_unscaled_grads) == (0.5, torch.float32, True)
        assert torch.equal(twin.grad_norm, optimizer.grad_norm) and int(twin.skipped_steps) == 0
        q = twin.param_groups[0]["params"][0]
        train(q, twin, range(2, 3))
        r = copy.deepcopy(optimizer)
        train(r.param_groups[0]["params"][0], r, range(2, 3))
        assert same_bits(snapshot(twin), snapshot(r))


# ---- Checkpoints that do not fit


@pytest.mark.parametrize(
    ("source", "target", "missing"),
    (
        (lambda p: torch.optim.SGD(p, momentum=0.9), AdamW, "exp_avg"),
        (lambda p: SGD(p, momentum=0.9), AdamW, "exp_avg"),
        (Lion, LAMB, "exp_avg_sq"),
        (torch.optim.Adagrad, Lion, "exp_avg"),
        (AdamW, lambda p: SGD(p, momentum=0.9), "momentum_buffer"),
        (torch.optim.Adadelta, AdamW, "exp_avg"),
    ),
)
def test_checkpoints_of_another_optimizer(backend, device, source, target, missing) -> None:
    p, q = parameter(device, n=7), parameter(device, n=7)
    first, second = source([p]), target([("weight", q)])
    train(p, first, range(2))
    train(q, second, range(2))
    saved = first.state_dict()
    if type(second) is SGD:  # whose groups say whether there is a momentum
        saved["param_groups"][0]["momentum"] = 0.9
    before, groups = snapshot(second), copy.deepcopy(second.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=f"state '{missing}' of parameter 'weight': got none, beside "):
        second.load_state_dict(saved)
    assert same_bits(before, snapshot(second)) and second.state_dict()["param_groups"] == groups


def test_states_that_no_step_could_use(backend, device) -> None:
    p = parameter(device, n=7)
    optimizer = AdamW([p])
    train(p, optimizer, range(2))
    before = snapshot(optimizer)
    wrong = {
        "exp_avg": (torch.ones(7).long(), torch.ones(7) + 1j, None, 3.0),
        "exp_avg_sq": (torch.ones(7, dtype=torch.bool),),
        "step": (torch.tensor(1j), None, "2"),
    }
    for key, values in wrong.items():
        for value in values:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0][key] = value
            with pytest.raises(
                ValueError, match=f"state '{key}' of parameter 0 of group 0: got .*, needs a real floating"
            ):
                optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="state 'max_exp_avg_sq' of parameter 0 of group 0: got none, beside"):
        optimizer.load_state_dict(saved)
    assert same_bits(before, snapshot(optimizer))


def test_checkpoints_with_little_in_them(backend, device) -> None:
    """No state yet, for all or for some; a momentum of None; a master alone; options that no group can be given."""
    a, b = parameter(device, n=7), parameter(device, n=7)
    first = AdamW([a, b])
    train(a, first, range(2))
    saved = first.state_dict()
    saved["param_groups"][0].update(differentiable=True, max_grad_norm=1.0)
    second = AdamW([parameter(device, n=7), parameter(device, n=7)])
    for state in (saved, AdamW([a, b]).state_dict(), {**saved, "state": {0: {}, 1: {"master": torch.ones(7)}}}):
        second.load_state_dict(copy.deepcopy(state))
        for p in second.param_groups[0]["params"]:
            set_grad(p, 1.0)
        second.step()
    torchs = torch.optim.SGD([a], momentum=0.9)
    old = {"state": {0: {"momentum_buffer": None}}, "param_groups": torchs.state_dict()["param_groups"]}
    third = SGD([a], momentum=0.9)
    third.load_state_dict(old)
    train(a, third, range(1))
    assert float(third.state[a]["step"]) == 1


@pytest.mark.parametrize("names", (False, True))
def test_a_state_of_the_wrong_shape(backend, device, names) -> None:
    a, b = parameter(device, n=7), parameter(device, n=3)
    first = AdamW([a])
    train(a, first, range(1))
    second = AdamW([("weight", b)] if names else [b])
    set_grad(b, 1.0)
    second.step()
    before = snapshot(second)
    name = "parameter 'weight'" if names else "parameter 0 of group 0"
    with pytest.raises(ValueError, match=rf"state 'exp_avg' of {name}: got shape \(7,\), needs \(3,\)"):
        second.load_state_dict(first.state_dict())
    assert same_bits(before, snapshot(second))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        AdamW([{"params": [a]}, {"params": [b]}]).load_state_dict(first.state_dict())

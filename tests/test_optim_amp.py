"""memkern's optimizers under both GradScalers: the protocol, and each way it is known to go wrong.

    T1  found_inf of 2, from two GPUs          test_found_inf_is_a_count, and of the ops test_a_skip_changes_no_bit
    T2  overflow on the first step             test_skip_on_the_very_first_step
    T3  checkpoint of torch unfused -> fused   test_flags_of_a_checkpoint_choose_nothing
    T4  checkpoint of torch fused -> unfused   test_flags_of_a_checkpoint_choose_nothing
    T5  groups that disagree about fused       test_flags_of_groups_choose_nothing
    T6  an exception inside step               test_an_exception_leaves_no_scale_behind
    T7  a gradient broken after unscale_       test_a_gradient_broken_after_unscale
    T8  infinite only once unscaled            test_scales_that_make_a_gradient_infinite, test_finite_after_unscaling
    T9  a scale backed off to 0                the same two, and test_the_scale_has_a_floor
    T10 fp16 parameters                        test_half_parameters
    T11 bf16 parameter, fp32 gradient          test_gradients_of_another_dtype
    T12 fp32 parameter, bf16 states            test_states_keep_their_dtype
    T13 states cast when loaded                test_states_keep_their_dtype
    T14 eps that is 0 in fp16                  test_no_overflow_of_sixteen_bit_arithmetic, test_zero_gradients_and_...
    T15 bf16 updates below half a unit         test_small_steps_of_bf16_parameters
    T16 grad_scale set by the user             test_grad_scale_of_the_user
    T17 no gradients at all                    test_no_gradients_at_all
    T18 sparse gradients                       test_sparse_gradients

Here, but for those of the ops (test_optim.py), T12 and T13 (test_optim_state.py).
"""

from __future__ import annotations

import math

import pytest
import torch

import memkern
from memkern.optim import SGD, AdamW
from tests.no_sync import no_sync
from tests.optim_tools import parameter, same_bits, set_grad, snapshot


def test_scaled_steps_are_unscaled_steps(scaler, device, make_optimizer) -> None:
    scaled, plain = parameter(device), parameter(device)
    under_scaler, alone = make_optimizer([scaled]), make_optimizer([plain])
    for i in range(4):
        set_grad(scaled, 4 * (i - 1.5))
        set_grad(plain, i - 1.5)
        scaler.step(under_scaler)
        scaler.update()
        alone.step()
    assert same_bits(snapshot(under_scaler), snapshot(alone))
    assert int(under_scaler.skipped_steps) == 0
    assert not hasattr(under_scaler, "grad_scale") and not hasattr(under_scaler, "found_inf")


def test_unscale_clip_step(scaler, device, make_optimizer) -> None:
    """torch's own way of clipping: unscale_, clip_grad_norm_, step."""
    params, twins = ([parameter(device), parameter(device, 2.0, 3)] for _ in range(2))
    under_scaler, alone = make_optimizer(params), make_optimizer(twins)
    for value in (0.5, 3.0, math.inf, 7.0):
        for p, twin in zip(params, twins, strict=True):
            set_grad(p, value * scaler.get_scale())
            set_grad(twin, value)
        scaler.unscale_(under_scaler)
        torch.nn.utils.clip_grad_norm_(params, 2.0)
        scaler.step(under_scaler)
        scaler.update()
        if value != math.inf:
            torch.nn.utils.clip_grad_norm_(twins, 2.0)
            alone.step()
    assert same_bits(snapshot(under_scaler), snapshot(alone))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_models_train_with_masters(backend, device, dtype) -> None:
    """As the same model in fp32 does."""
    losses = []
    for own in (torch.float32, dtype):
        torch.manual_seed(0)
        x = torch.randn(16, 8, device=device)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(device, own)
        optimizer = AdamW(model.parameters(), lr=1e-2, master_weights=torch.float32, max_grad_norm=1.0)
        scaler = memkern.amp.GradScaler(device, init_scale=2.0**20)  # overflows at first
        for _ in range(30):
            optimizer.zero_grad()
            loss = (model(x.to(own)).float() - x[:, :4].sin()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(float(loss.detach()))
        assert int(optimizer.skipped_steps) > 0 or own != torch.float16
    assert losses[1] == pytest.approx(losses[0], rel=0.15) and losses[0] < 0.2


@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
@pytest.mark.parametrize("unscale_first", (False, True))
def test_overflow_skips_everything(scaler, device, make_optimizer, bad, unscale_first) -> None:
    """Also where unscale_ came first: grad_scale is then None, and found_inf still counts."""
    a, b = parameter(device), parameter(device, 2.0, 3)
    optimizer = make_optimizer([{"params": [a]}, {"params": [b], "lr": 0.3}])
    for skip in (False, True, True, False):
        set_grad(a, 4.0)
        set_grad(b, 8.0)
        if skip:
            b.grad[1] = bad
        if unscale_first:
            scaler.unscale_(optimizer)
        before, scale, skipped = snapshot(optimizer), scaler.get_scale(), int(optimizer.skipped_steps)
        scaler.step(optimizer)
        scaler.update()
        if before and optimizer.state and len(snapshot(optimizer)) == len(before):
            assert same_bits(before, snapshot(optimizer)) == skip
        assert scaler.get_scale() == (scale / 2 if skip else scale)
        assert int(optimizer.skipped_steps) == skipped + skip
    assert not torch.equal(a, torch.ones_like(a))


def test_skip_on_the_very_first_step(scaler, device, make_optimizer) -> None:
    """T2: states made by a step that is then skipped are zeros, and the next step is a first step."""
    p, q = parameter(device), parameter(device)
    optimizer, fresh = make_optimizer([p]), make_optimizer([q])
    set_grad(p, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.ones_like(p))
    set_grad(p, 2.0)  # the scale is 2 now
    scaler.step(optimizer)
    set_grad(q, 1.0)
    fresh.step()
    assert same_bits(snapshot(optimizer), snapshot(fresh))


def test_dampening_leaves_the_first_step_that_counts_alone(scaler, device) -> None:
    p, q = parameter(device), parameter(device)
    ours = SGD([p], lr=0.1, momentum=0.9, dampening=0.5)
    torchs = torch.optim.SGD([q], lr=0.1, momentum=0.9, dampening=0.5)
    for value in (math.inf, 1.0, 2.0, 3.0):
        set_grad(p, value * scaler.get_scale())
        scaler.step(ours)
        scaler.update()
        if value != math.inf:
            set_grad(q, value)
            torchs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("count", (2.0, 3.0, math.nan))
def test_found_inf_is_a_count(backend, device, make_optimizer, count) -> None:
    """T1: the sum of the flags of several GPUs."""
    p = parameter(device)
    optimizer = make_optimizer([p])
    set_grad(p, 1.0)
    optimizer.step()
    before = snapshot(optimizer)
    set_grad(p, math.inf)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(count, device=device), None
    optimizer.step()
    assert same_bits(before, snapshot(optimizer))


@pytest.mark.parametrize("flags", ((None, True), (True, None)))
def test_flags_of_a_checkpoint_choose_nothing(scaler, device, flags) -> None:
    """T3, T4: fused= of a checkpoint from the other kind of torch optimizer."""
    p, q = parameter(device), parameter(device)
    theirs = torch.optim.AdamW([q], fused=flags[0] if flags[0] or device != "cpu" else False)
    set_grad(q, 1.0)
    theirs.step()
    optimizer = AdamW([p], fused=flags[1])
    optimizer.load_state_dict(theirs.state_dict())
    set_grad(p, math.inf)
    before = snapshot(optimizer)
    with no_sync(device):
        scaler.step(optimizer)
    assert same_bits(before, snapshot(optimizer)) and int(optimizer.skipped_steps) == 1


def test_flags_of_groups_choose_nothing(scaler, device) -> None:
    """T5: groups that disagree about fused."""
    a, b = parameter(device), parameter(device)
    optimizer = AdamW([{"params": [a], "fused": True}, {"params": [b], "fused": False}])
    set_grad(a, 4.0)
    set_grad(b, 4.0)
    scaler.step(optimizer)
    assert torch.equal(a, b) and not torch.equal(a, torch.ones_like(a))


def test_an_exception_leaves_no_scale_behind(scaler, device, monkeypatch) -> None:
    """T6: torch's scaler takes grad_scale back only after success; the next step would multiply it in again."""
    p, q = parameter(device), parameter(device)
    optimizer, alone = AdamW([p]), AdamW([q])

    def broken(*arguments):
        raise MemoryError("broken")

    set_grad(p, 4.0)
    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "_update", broken)
        with pytest.raises(MemoryError, match="broken"):
            scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
    assert optimizer._checked is None
    optimizer.state.clear()  # the counter has advanced
    scaler.step(optimizer)
    set_grad(q, 1.0)
    alone.step()
    assert same_bits(snapshot(optimizer), snapshot(alone))


def test_a_hook_that_raises_leaves_nothing_behind(backend, device) -> None:
    scaler = memkern.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    p = parameter(device)
    optimizer = AdamW([p])

    def broken(*arguments):
        raise MemoryError("broken")

    set_grad(p, math.inf)
    handle = optimizer.register_step_pre_hook(broken)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    handle.remove()
    assert optimizer._checked is None and not hasattr(optimizer, "grad_scale")
    set_grad(p, 4.0)
    scaler.step(optimizer)
    assert int(optimizer.skipped_steps) == 0 and not torch.equal(p, torch.ones_like(p))


def test_a_gradient_broken_after_unscale(scaler, device) -> None:
    """T7: torch trusts the flag of unscale_. With max_grad_norm, infinity included, the step looks again."""
    for max_grad_norm, skips in ((None, False), (math.inf, True), (1.0, True)):
        p = parameter(device)
        optimizer = SGD([p], lr=0.1, max_grad_norm=max_grad_norm)
        set_grad(p, 4.0)
        scaler.unscale_(optimizer)
        p.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        assert bool(p.isnan().any()) != skips and int(optimizer.skipped_steps) == skips


def test_a_gradient_mended_after_unscale(scaler, device) -> None:
    """The flag of unscale_ stands, whatever the step's own look says."""
    p = parameter(device)
    optimizer = SGD([p], lr=0.1, max_grad_norm=1.0)
    set_grad(p, math.inf)
    scaler.unscale_(optimizer)
    p.grad.fill_(1.0)
    scaler.step(optimizer)
    assert torch.equal(p, torch.ones_like(p)) and int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize(
    ("scale", "gradient"), ((2.0**-120, 1e10), (0.0, 1.0), (math.inf, 1.0)), ids=("T8", "T9", "infinite scale")
)
def test_scales_that_make_a_gradient_infinite(scaler, device, make_optimizer, scale, gradient) -> None:
    p = parameter(device)
    optimizer = make_optimizer([p])
    set_grad(p, 4.0)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(optimizer)
    scaler._scale.fill_(scale)
    set_grad(p, gradient)
    scaler.step(optimizer)
    assert same_bits(before, snapshot(optimizer)) and int(optimizer.skipped_steps) == 1


def test_the_scale_has_a_floor(backend, device) -> None:
    """T9: where it would back off to 0."""
    scaler = memkern.amp.GradScaler(device, init_scale=2.0**-12)
    scaler.scale(torch.ones((), device=device))
    p = parameter(device)
    optimizer = AdamW([p])
    for expected in (-13, -14, -14, -14):
        set_grad(p, math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**expected
    scaler.update(2.0**-20)  # what the user sets is the user's
    assert scaler.get_scale() == 2.0**-20


def test_half_parameters(scaler, device) -> None:
    """T10: the step takes float16 gradients; unscale_, as in torch, does not: max_grad_norm is how to clip them."""
    p, q = parameter(device, dtype=torch.float16), parameter(device)
    optimizer = AdamW([p], lr=0.1, master_weights=torch.float32, max_grad_norm=1.0)
    alone = AdamW([q], lr=0.1, max_grad_norm=1.0)
    set_grad(p, 4.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    set_grad(q, 1.0)
    scaler.step(optimizer)
    alone.step()
    assert torch.equal(optimizer.state[p]["master"], q) and torch.equal(p, q.half())


@pytest.mark.parametrize("grad_dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_another_dtype(scaler, device, make_optimizer, grad_dtype) -> None:
    """T11: gradients accumulated in fp32 for bf16 parameters, or the other way round."""
    own = torch.bfloat16 if grad_dtype == torch.float32 else torch.float32
    p, q = parameter(device, dtype=own), parameter(device, dtype=own)
    if not hasattr(p, "grad_dtype"):
        pytest.skip(f"torch {torch.__version__} has no grad_dtype")
    p.grad_dtype = grad_dtype
    optimizer, alone = make_optimizer([p]), make_optimizer([q])
    for value in (4.0, math.inf, 6.0):
        set_grad(p, value, grad_dtype)
        scaler.step(optimizer)
        if value != math.inf:
            set_grad(q, value / scaler.get_scale())
            alone.step()
        scaler.update(4.0)
    assert same_bits(snapshot(optimizer), snapshot(alone))


def test_no_overflow_of_sixteen_bit_arithmetic(backend, device) -> None:
    """T14: eps of 1e-8 is 0 in float16; a zero gradient must leave the parameter, a small one move it by lr."""
    for gradient, expected in ((0.0, 1.0), (1e-5, 0.9)):
        p = parameter(device, dtype=torch.float16)
        optimizer = AdamW([p], lr=0.1, weight_decay=0)
        for _ in range(1):
            set_grad(p, gradient)
            optimizer.step()
        assert torch.equal(p, torch.full_like(p, expected))


def test_small_steps_of_bf16_parameters(backend, device, make_optimizer) -> None:
    """T15: steps below half a bf16 unit add up in the fp32 masters."""
    plain, kept, exact = (parameter(device, dtype=t) for t in (torch.bfloat16, torch.bfloat16, torch.float32))
    optimizers = [
        make_optimizer([plain]),
        make_optimizer([kept], master_weights=torch.float32),
        make_optimizer([exact]),
    ]
    for _ in range(100):
        for p, optimizer in zip((plain, kept, exact), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-4
            set_grad(p, 0.5)
            optimizer.step()
    assert torch.equal(plain, torch.ones_like(plain))
    assert torch.equal(kept, exact.bfloat16()) and float(kept[0]) < 1
    assert torch.equal(optimizers[1].state[kept]["master"], exact)


def test_grad_scale_of_the_user(scaler, device, make_optimizer) -> None:
    """T16: a factor that the user sets is multiplied in, for one step."""
    p, q = parameter(device), parameter(device)
    optimizer, alone = make_optimizer([p]), make_optimizer([q])
    for factor in (8.0, torch.tensor(8.0, device=device)):
        optimizer.grad_scale = factor
        set_grad(p, 4.0 * 8.0)
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "grad_scale")
        assert float(optimizer.grad_norm) == pytest.approx(math.sqrt(5))
        set_grad(q, 1.0)
        alone.step()
    assert same_bits(snapshot(optimizer), snapshot(alone))
    optimizer.grad_scale = 8.0  # after unscale_, and alone, it is the only one
    set_grad(p, 8.0)
    optimizer.step()
    alone.step()
    assert same_bits(snapshot(optimizer), snapshot(alone))


def test_no_gradients_at_all(backend, device, make_optimizer) -> None:
    """T17: nothing happens, and update() does not fail (torch's own scaler does, after any optimizer)."""
    p = parameter(device)
    optimizer = make_optimizer([p])
    optimizer.step()
    scaler = memkern.amp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    for unscale_first in (False, True):
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(p, torch.ones_like(p)) and len(optimizer.state) == 0
    assert scaler.state_dict()["_growth_tracker"] == 0 and scaler.get_scale() == 2.0**16
    torchs = torch.amp.GradScaler(device)
    torchs.scale(torch.ones((), device=device))
    torchs.step(optimizer)  # found_inf is the number 0
    assert torch.equal(p, torch.ones_like(p))


def test_sparse_gradients(scaler, device, make_optimizer) -> None:
    """T18: refused by name, before anything is written."""
    a, b = parameter(device), parameter(device)
    optimizer = make_optimizer([("first", a), ("table", b)])
    set_grad(a, 4.0)
    b.grad = torch.sparse_coo_tensor([[1]], [4.0], (5,), device=device)
    with pytest.raises(TypeError, match=r"gradient of parameter 'table': got torch.float32, torch.sparse_coo"):
        scaler.step(optimizer)
    assert torch.equal(a, torch.ones_like(a)) and not hasattr(optimizer, "found_inf")

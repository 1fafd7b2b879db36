"""memkern's optimizers beside torch's: the same arguments give the same training."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memkern
from memkern import optim
from tests.optim_tools import parameter, same_bits, set_grad, snapshot
from tests.ulp import spacing

NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.01}
PAIRS: dict[str, tuple[Callable, Callable]] = {
    name: (lambda p, o=ours, kw=kw: o(p, **kw), lambda p, t=theirs, kw=kw: t(p, **kw))
    for name, ours, theirs, kw in [
        ("AdamW", optim.AdamW, torch.optim.AdamW, {}),
        ("AdamW amsgrad maximize", optim.AdamW, torch.optim.AdamW, {"amsgrad": True, "maximize": True, "lr": 0.01}),
        ("Adam", optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}),
        ("Adam decoupled", optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("SGD", optim.SGD, torch.optim.SGD, {"lr": 0.05}),
        ("SGD momentum", optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
        ("SGD nesterov", optim.SGD, torch.optim.SGD, NESTEROV),
    ]
}


@pytest.fixture(autouse=True)
def one_thread():
    """On tensors this small, PyTorch's threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest):
    return PAIRS[request.param]


def transformer(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), layer, torch.nn.Linear(16, 8)).to(device)


def within(ours: Tensor, theirs: Tensor, before: Tensor, ulps: float, floor: float = 0.0) -> bool:
    size = torch.maximum(torch.maximum(theirs.abs(), before.abs()).double(), torch.tensor(floor, device=theirs.device))
    return bool(((ours - theirs).double().abs().cpu() <= ulps * spacing(size.cpu(), torch.float32)).all())


def test_200_steps_of_a_transformer(backend, device, pair) -> None:
    """Each from torch's parameters and states, on torch's gradients: within 2 ulp of what torch makes of them.

    The ulp is that of the value's size before or after, or of the learning rate: a parameter that passes 0
    carries the rounding of an update that is larger than itself. States: of the gradient's size. The reference
    computes in fp64, so that torch's own rounding shows in full.
    """
    ulps = 3 if backend == "reference" else 2
    steps = 200 if backend in ("cpu", "cuda") else 5
    model = transformer(device)
    params = list(model.parameters())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours, theirs = pair[0](twins), pair[1](params)
    lr = ours.param_groups[0]["lr"]
    torch.manual_seed(1)
    for _ in range(steps):
        theirs.zero_grad()
        x = torch.randn(4, 5, 8, device=device)
        sign = -1 if ours.param_groups[0]["maximize"] else 1
        (sign * (model(x) - x.cos()).square().mean()).backward()
        before = [p.detach().clone() for p in params]
        states_before = {
            p: {k: v.clone() for k, v in s.items() if isinstance(v, Tensor)} for p, s in theirs.state.items()
        }
        for twin, p in zip(twins, params, strict=True):
            twin.data.copy_(p.data)
            twin.grad = p.grad.clone()
            for key in theirs.state[p]:
                if key in ours.state[twin] and isinstance(theirs.state[p][key], Tensor):
                    ours.state[twin][key].copy_(theirs.state[p][key])
        ours.step()
        theirs.step()
        for twin, p, was in zip(twins, params, before, strict=True):
            assert within(twin, p, was, ulps, lr)
            for key, value in theirs.state[p].items():
                if key == "step":
                    assert float(ours.state[twin][key]) == float(value)
                elif value is not None:
                    largest = float(p.grad.abs().max()) + 0.1 * float(was.abs().max())
                    floor = largest**2 if "sq" in key else largest
                    assert within(ours.state[twin][key], value, states_before.get(p, {}).get(key, value), ulps, floor)


def test_a_long_run_stays_beside_torch(backend, device, pair) -> None:
    """Left alone on the same gradients, the rounding errors do not add up to more than a few a step."""
    params, twins = [parameter(device, 0.5, 301)], [parameter(device, 0.5, 301)]
    ours, theirs = pair[0](twins), pair[1](params)
    torch.manual_seed(0)
    for _ in range(30):
        params[0].grad = torch.randn(301, device=device)
        twins[0].grad = params[0].grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(twins[0], params[0], rtol=1e-5, atol=1e-6)


def test_amp_with_overflows_follows_torch(backend, device) -> None:
    """fp16 autocast, forced overflows, clipping: the trajectory of torch's unfused path with the same gradients."""
    model = transformer(device)
    params = list(model.parameters())
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = torch.optim.AdamW(params, lr=1e-2, fused=False, foreach=False)
    ours = optim.AdamW(twins, lr=1e-2, max_grad_norm=0.5)
    scalers = [
        torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=4),
        memkern.amp.GradScaler(device, init_scale=1024.0, growth_interval=4),
    ]
    scalers[1].scale(torch.ones((), device=device))
    torch.manual_seed(1)
    overflows = (0, 5, 6, 13)
    for i in range(24 if backend != "emulated" else 8):
        x = torch.randn(4, 5, 8, device=device)
        theirs.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = (model(x) - x.cos()).float().square().mean()
        scalers[0].scale(loss).backward()
        if i in overflows:
            params[3].grad[0] = math.inf
        for twin, p in zip(twins, params, strict=True):
            twin.grad = p.grad.clone()
        scalers[0].unscale_(theirs)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        scalers[0].step(theirs)
        scalers[1].step(ours)
        for scaler in scalers:
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        if i not in overflows:
            torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
        for twin, p in zip(twins, params, strict=True):
            torch.testing.assert_close(twin, p, rtol=1e-4, atol=1e-6)
            for key, value in theirs.state[p].items():
                torch.testing.assert_close(ours.state[twin][key].cpu(), value.cpu(), rtol=1e-4, atol=1e-9)
    assert int(ours.skipped_steps) == sum(i < 24 if backend != "emulated" else i < 8 for i in overflows)


def test_signatures(pair) -> None:
    """torch's arguments, in torch's order, with torch's defaults."""
    p = parameter("cpu")
    ours, theirs = type(pair[0]([p])), type(pair[1]([p]))
    expected = inspect.signature(theirs).parameters
    actual = inspect.signature(ours).parameters
    for name, parameter_ in expected.items():
        assert (actual[name].default, actual[name].kind) == (parameter_.default, parameter_.kind)
    assert set(actual) - set(expected) == {"max_grad_norm", "master_weights", "write_unscaled_grads"}
    assert issubclass(ours, torch.optim.Optimizer)
    assert list(pair[0]([p]).param_groups[0]) == list(pair[1]([p]).param_groups[0])


def test_clipping_is_that_of_clip_grad_norm(backend, device, pair) -> None:
    params, twins = ([parameter(device, 1.0, 7), parameter(device, 2.0, 4)] for _ in range(2))
    ours, theirs = pair[0](twins), pair[1](params)
    ours.max_grad_norm = 1.5
    for scale in (0.1, 1.0, 100.0):
        for some in (params, twins):
            for p in some:
                set_grad(p, scale)
        norm = torch.nn.utils.clip_grad_norm_(params, 1.5)
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm)
    torch.testing.assert_close(twins, params, rtol=1e-5, atol=1e-6)


def test_groups_late_gradients_and_tensor_lr(backend, device) -> None:
    """A parameter whose gradient comes late has a step counter of its own."""

    def both(kind: Callable) -> list[Tensor]:
        torch.manual_seed(0)
        a, b, c, frozen = (torch.nn.Parameter(torch.randn(5, device=device)) for _ in range(4))
        groups = [
            {"params": [a, frozen]},
            {"params": [b, c], "lr": torch.tensor(0.3, device=device), "weight_decay": 0.0},
        ]
        optimizer = kind(groups, lr=0.1, weight_decay=0.5)
        for i in range(4):
            for p in (a, b, c):
                p.grad = None if p is c and i < 2 else torch.randn(5, device=device)
            optimizer.step()
        return [a, b, c, frozen, *(optimizer.state[p]["step"].to(device) for p in (a, b, c))]

    torch.testing.assert_close(both(optim.AdamW), both(torch.optim.AdamW))


@pytest.mark.parametrize("kind", ("AdamW", "SGD"))
def test_one_cycle(backend, device, kind) -> None:
    """The schedule writes another momentum, or first beta, into the group before every step."""
    results = []
    for module in (optim, torch.optim):
        p = parameter(device)
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(module, kind)([p], lr=0.1, **more)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        for i in range(12):
            set_grad(p, math.cos(i))
            optimizer.step()
            scheduler.step()
        group = optimizer.param_groups[0]
        results.append((p, group["lr"], group["momentum"] if kind == "SGD" else group["betas"][0]))
    torch.testing.assert_close(*results)


def test_a_group_that_comes_later(backend, device, pair) -> None:
    """Its steps count from its own first one."""
    results = []
    for kind in pair:
        torch.manual_seed(0)
        a, b = (torch.nn.Parameter(torch.randn(5, device=device)) for _ in range(2))
        optimizer = kind([a])
        for i in range(5):
            if i == 2:
                optimizer.add_param_group({"params": [b], "lr": 0.03})
            for p in (a, b):
                p.grad = torch.randn(5, device=device)
            optimizer.step()
        results.append((a, b))
    torch.testing.assert_close(*results)


def test_rates_closures_and_hooks_of_every_optimizer(backend, device, make_optimizer) -> None:
    """A rate in a tensor, a closure, and gradients that a hook makes: as the rate, the loss and gradients by hand."""
    p, q = parameter(device, 0.5), parameter(device, 0.5)
    optimizer, by_hand = make_optimizer([p], max_grad_norm=1.0), make_optimizer([q], max_grad_norm=1.0)
    optimizer.param_groups[0]["lr"] = lr = torch.tensor(0.25, device=device)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    def halve(*_):
        calls.append("before")
        lr.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for i in range(3):
        by_hand.param_groups[0]["lr"] = 0.25 * 0.5 ** (i + 1)
        q.grad = 2 * q.detach()
        expected = q.detach().square().sum()
        by_hand.step()
        torch.testing.assert_close(optimizer.step(closure), expected)
    assert calls == ["before", "after"] * 3
    assert same_bits(snapshot(optimizer), snapshot(by_hand))


def test_closure_hooks_and_schedulers(backend, device) -> None:
    p = parameter(device)
    optimizer = optim.SGD([p], lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 5
    scheduler.step()
    optimizer.step(closure)
    assert calls == ["before", "closure", "after"] * 2
    assert torch.equal(p, torch.full_like(p, 1.0 - 1.0 - 0.5))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_autograd_sees_that_the_parameter_changed(backend, device, make_optimizer, dtype) -> None:
    """By the version that PyTorch counts: a graph from before the step has no right gradient any more."""
    p = parameter(device, dtype=dtype)
    optimizer = make_optimizer([p], master_weights=torch.float32, write_unscaled_grads=True)
    set_grad(p, 4.0)
    optimizer.grad_scale = 2.0
    loss, versions = p.square().sum(), (p._version, p.grad._version)
    optimizer.step()
    assert p._version > versions[0] and p.grad._version > versions[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_norm_sees_the_step(backend, device) -> None:
    """memory_efficient looks at a weight again once it has changed: of one that the step made 0, y does not tell x."""
    x = torch.randn(3, 8, device=device)
    ours, torchs = memkern.nn.RMSNorm(8, device=device, memory_efficient=True), torch.nn.RMSNorm(8, device=device)
    for norm, optimizer_type in ((ours, optim.SGD), (torchs, torch.optim.SGD)):
        optimizer = optimizer_type(norm.parameters(), lr=1.0)
        norm(x)
        set_grad(norm.weight, 1.0)
        optimizer.step()
        assert torch.equal(norm.weight, torch.zeros_like(norm.weight))
        optimizer.zero_grad()
        norm(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, torchs.weight.grad)


@pytest.mark.parametrize(
    "layout", ("channels last", "contiguous gradient", "transposed", "gaps", "expanded gradient", "one column")
)
def test_memory_layouts(backend, device, layout) -> None:
    """Parameter and gradient in different orders of memory."""
    torch.manual_seed(0)
    value, grad = torch.randn(2, 3, 4, 5, device=device), torch.randn(2, 3, 4, 5, device=device)
    p, g = value.clone(), grad.clone()
    if layout == "channels last":
        p, g = (x.to(memory_format=torch.channels_last) for x in (p, g))
    elif layout == "contiguous gradient":
        p = p.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        p = p.transpose(0, 3).contiguous().transpose(0, 3)
    elif layout == "gaps":
        p = torch.cat([p, torch.full_like(p, math.nan)], -1)[..., :5]
    elif layout == "expanded gradient":
        g = grad[:, :, :1, :1].expand_as(grad)
        grad = g.contiguous()
    else:
        value, grad, p, g = (x[..., :1].contiguous() for x in (value, grad, p, g))
        g = g.as_strided(g.shape, (12, 4, 1, 77))
    a, b = torch.nn.Parameter(value.clone()), torch.nn.Parameter(p)
    write = layout != "expanded gradient"  # whose elements cannot be written
    for x, gradient in ((a, grad.contiguous()), (b, g)):
        optimizer = optim.AdamW([x], lr=0.1, max_grad_norm=1.0, write_unscaled_grads=write)
        for _ in range(2):
            x.grad = gradient.clone() if write else gradient
            assert x.grad.stride() == gradient.stride()
            optimizer.grad_scale = 2.0
            optimizer.step()
            torch.testing.assert_close(x.grad, gradient / 2 if write else gradient)
    if layout == "channels last":
        assert optimizer.state[b]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_16_bit_parameters_without_masters(backend, device) -> None:
    """States are fp32 there, which torch's are not: the update is the fp32 one, rounded once a step."""
    for dtype in (torch.float16, torch.bfloat16):
        p = parameter(device, 1.0, dtype=dtype)
        optimizer = optim.AdamW([p], lr=0.1)
        for _ in range(3):
            before = p.detach().float()
            q = torch.nn.Parameter(before.clone())
            alone = optim.AdamW([q], lr=0.1)
            if optimizer.state:
                alone.state[q] = {k: v.clone() for k, v in optimizer.state[p].items()}
            set_grad(p, 1e-4)
            q.grad = p.grad.float()
            optimizer.step()
            alone.step()
            assert torch.equal(p, q.to(dtype))
            assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert same_bits(snapshot(optimizer)[1:], snapshot(alone)[1:])

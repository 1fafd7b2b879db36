"""Optimizer steps for the tests: random tensors for each op, and the same step by its textbook formula in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from memkern import backends, ops
from tests.ulp import spacing

SIZES = (1, 0, 3, 4099, 48, 17, 0)  # odd and whole vectors, a block of the CPU's and a bit, empty ones at the end too
HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Dtypes:
    """Of parameter, gradient and states. ``master``: whether there is an fp32 parameter behind the 16-bit one."""

    param: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    master: bool = False

    def __str__(self) -> str:
        short = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.param, self.grad, self.state))
        return short + ("-master" if self.master else "")


DTYPES = [
    Dtypes(FP32, FP32, FP32),
    Dtypes(FP64, FP64, FP64),
    Dtypes(FP32, FP32, BF16),
    Dtypes(FP32, BF16, FP32),
    Dtypes(BF16, FP32, FP32),
    Dtypes(HALF, HALF, FP32, master=True),
    Dtypes(BF16, BF16, FP32, master=True),
    Dtypes(BF16, BF16, BF16),
    Dtypes(HALF, HALF, HALF),
]

Update = Callable[[Tensor, Tensor, list[Tensor], float], tuple[Tensor, list[Tensor]]]
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1


def adamw(amsgrad: bool, decoupled: bool) -> Update:
    def update(p: Tensor, g: Tensor, states: list[Tensor], t: float) -> tuple[Tensor, list[Tensor]]:
        if decoupled:
            p = p - LR * DECAY * p
        else:
            g = g + DECAY * p
        m = BETA1 * states[0] + (1 - BETA1) * g
        v = BETA2 * states[1] + (1 - BETA2) * g**2
        used, new = v, [m, v]
        if amsgrad:
            used = torch.maximum(states[2], v)
            new.append(used)
        return p - LR * (m / (1 - BETA1**t)) / (torch.sqrt(used / (1 - BETA2**t)) + EPS), new

    return update


def sgd(momentum: float, dampening: float, nesterov: bool) -> Update:
    def update(p: Tensor, g: Tensor, states: list[Tensor], t: float) -> tuple[Tensor, list[Tensor]]:
        g = g + DECAY * p
        if momentum == 0:
            return p - LR * g, []
        b = g if t == 1 else momentum * states[0] + (1 - dampening) * g
        return p - LR * (g + momentum * b if nesterov else b), [b]

    return update


def lamb(p: Tensor, g: Tensor, states: list[Tensor], t: float) -> tuple[Tensor, list[Tensor]]:
    m = BETA1 * states[0] + (1 - BETA1) * g
    v = BETA2 * states[1] + (1 - BETA2) * g**2
    u = m / (1 - BETA1**t) / (torch.sqrt(v / (1 - BETA2**t)) + EPS) + DECAY * p
    a, b = float(p.square().sum().sqrt()), float(u.square().sum().sqrt())
    return p - LR * (a / b if a > 0 and b > 0 else 1.0) * u, [m, v]


def lion(p: Tensor, g: Tensor, states: list[Tensor], t: float) -> tuple[Tensor, list[Tensor]]:
    c = BETA1 * states[0] + (1 - BETA1) * g
    return p * (1 - LR * DECAY) - LR * c.sign(), [BETA2 * states[0] + (1 - BETA2) * g]


@dataclass(frozen=True)
class Algorithm:
    op: str
    update: Update
    states: int
    numbers: tuple  # after lr, before maximize
    counts: bool = True


ALGORITHMS = {
    "adamw": Algorithm("adamw_step", adamw(False, True), 2, (BETA1, BETA2, EPS, DECAY, True)),
    "adam": Algorithm("adamw_step", adamw(False, False), 2, (BETA1, BETA2, EPS, DECAY, False)),
    "amsgrad": Algorithm("adamw_step", adamw(True, True), 3, (BETA1, BETA2, EPS, DECAY, True)),
    "sgd": Algorithm("sgd_step", sgd(0, 0, False), 0, (0.0, 0.0, DECAY, False)),
    "momentum": Algorithm("sgd_step", sgd(0.9, 0.3, False), 1, (0.9, 0.3, DECAY, False)),
    "nesterov": Algorithm("sgd_step", sgd(0.9, 0, True), 1, (0.9, 0.0, DECAY, True)),
    "lamb": Algorithm("lamb_step", lamb, 2, (BETA1, BETA2, EPS, DECAY)),
    "lion": Algorithm("lion_step", lion, 1, (BETA1, BETA2, DECAY), counts=False),
}


@dataclass
class Tensors:
    """The lists of a step op."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    masters: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def random(cls, algorithm: Algorithm, dtypes: Dtypes, device: str, sizes=SIZES, step: float = 5.0, scale=1.0):
        torch.manual_seed(0)

        def normal(dtype: torch.dtype, factor: float = 1.0) -> list[Tensor]:
            return [(torch.randn(n) * factor).to(dtype).to(device) for n in sizes]

        masters = normal(FP32) if dtypes.master else []
        params = [master.to(dtypes.param) for master in masters] or normal(dtypes.param)
        grads = normal(dtypes.grad, scale)
        states = [normal(dtypes.state, 0.5) for _ in range(algorithm.states)]
        if algorithm.op != "sgd_step":
            # Squares; nearer to 0, the rounding of a gradient counts for more in a step than check_step allows.
            states[1:] = [[(s.float() ** 2 + 0.01).to(s.dtype) for s in some] for some in states[1:]]
        steps = [torch.tensor(step + i % 2, device=device) for i in range(len(sizes))] if algorithm.counts else []
        return cls(params, grads, states, masters, steps)

    def all(self) -> list[Tensor]:
        return [*self.params, *self.grads, *sum(self.states, []), *self.masters, *self.steps]

    def arguments(self, algorithm: Algorithm, maximize: bool, write_grads: bool, lr: float | None, **device_scalars):
        """Of the step op."""
        lists = [self.params, self.grads, *self.states]
        if algorithm.op == "adamw_step" and algorithm.states == 2:
            lists.append([])
        if algorithm.op == "sgd_step" and algorithm.states == 0:
            lists.append([])
        lists.append(self.masters)
        if algorithm.counts:
            lists.append(self.steps if algorithm.states else [])
        scalars = [device_scalars.get(name) for name in ("lr_tensor", "grad_scale", "clip", "found_inf")]
        return *lists, *scalars, LR if lr is None else lr, *algorithm.numbers, maximize, write_grads

    def run(self, backend: str, algorithm: Algorithm, maximize=False, write_grads=False, lr=None, **device_scalars):
        arguments = self.arguments(algorithm, maximize, write_grads, lr, **device_scalars)
        ops.op(backend, algorithm.op)(*arguments)


def on(device: str, value: float) -> Tensor:
    return torch.tensor(value, device=device)


def needs(backend: str, dtypes: Dtypes) -> None:
    if dtypes.param in backends._NOT_SERVED.get(backend, ()):
        pytest.skip(f"{backend} does not serve {dtypes.param}")


def assert_close(actual: Tensor, exact: Tensor, terms: tuple[Tensor, ...], ulps: float = 4) -> None:
    """Within ``ulps`` of fp32 (or fp64) at the size of the largest of the terms; 16-bit ones are that, rounded."""
    wide = torch.promote_types(actual.dtype, FP32)
    size = torch.stack([exact.abs(), *(term.cpu().double().abs().expand_as(exact) for term in terms)]).amax(0)
    allowed = ulps * spacing(size, wide) + (0.5 * spacing(exact, actual.dtype) if actual.dtype != wide else 0)
    assert ((actual.cpu().double() - exact).abs() <= allowed).all()


def check_step(
    backend: str, device: str, algorithm: Algorithm, dtypes: Dtypes, tensors: Tensors | None = None, *,
    maximize: bool = False, write_grads: bool = False, grad_scale: float | None = None, clip: float | None = None,
) -> Tensors:  # fmt: skip
    """Run the op once and compare every tensor in it with the formulas in fp64."""
    needs(backend, dtypes)
    t = tensors or Tensors.random(algorithm, dtypes, device, scale=grad_scale or 1.0)
    before = copy.deepcopy(t)
    given = {name: on(device, value) for name, value in (("grad_scale", grad_scale), ("clip", clip)) if value}
    t.run(backend, algorithm, maximize=maximize, write_grads=write_grads, **given)
    unscale = float(torch.tensor(1 / grad_scale)) if grad_scale else 1.0  # fp32, as the kernels have it
    factor = unscale * (float(given["clip"]) if clip else 1.0) * (-1 if maximize else 1)
    size = torch.tensor(LR)  # of a direction's rounding in a parameter, where the direction itself comes out near 0
    # The error of LAMB's norms, sums over the tensor, is in every element.
    ulps = (100 if dtypes.param == FP64 else 8) if algorithm.update is lamb else 4
    for i in range(len(t.params)):
        weight, grad, *states = (
            x[i].cpu().double() for x in (before.masters or before.params, before.grads, *before.states)
        )
        exact, new_states = algorithm.update(weight, grad * factor, states, float(t.steps[i]) if t.steps else 0.0)
        for k, (now, new, was) in enumerate(zip(t.states, new_states, before.states, strict=True)):
            assert_close(now[i], new, (was[i], *((x if k == 0 else x**2) for x in (grad * factor, DECAY * weight))))
        assert_close((t.masters or t.params)[i], exact, (weight, exact - weight, size), ulps)
        if t.masters:
            assert torch.equal(t.params[i], t.masters[i].to(dtypes.param))
        expected = (grad * unscale).to(dtypes.grad) if write_grads and grad_scale else before.grads[i].cpu()
        assert torch.equal(t.grads[i].cpu(), expected)
    return t

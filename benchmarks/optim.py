"""One AMP step: unscale, finite check, clip to a norm, AdamW. memkern's, and torch's fused and foreach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import memkern
from benchmarks.harness import Case, Family, Function

WIDTH, LAYERS, VOCABULARY, CONTEXT = 1024, 24, 50257, 1024  # GPT-2 medium
LARGEST = {"cuda": 1, "cpu": 8}  # its tensors are divided by this
HUGE = {"cuda": 354_823_168, "cpu": 50_000_000}  # elements of the one tensor
MAX_NORM = 1.0
BYTES = 32  # an fp32 parameter: the gradient read twice, parameter and two moments read and written


def gpt2_medium(divisor: int) -> list[int]:
    """Elements of each of its 292 parameter tensors, divided."""
    matrices = [3 * WIDTH**2, WIDTH**2, 4 * WIDTH**2, 4 * WIDTH**2]
    vectors = [WIDTH] * 2 + [3 * WIDTH, WIDTH] + [WIDTH] * 2 + [4 * WIDTH, WIDTH]  # norms and biases
    whole = [VOCABULARY * WIDTH, CONTEXT * WIDTH, *(LAYERS * (matrices + vectors)), WIDTH, WIDTH]
    return [max(1, n // divisor) for n in whole]


def cases(device: str, quick: bool) -> list[Case]:
    many = sum(gpt2_medium(64 if quick else LARGEST[device]))
    sizes = {"292 tensors": many, "1 tensor": many if quick else HUGE[device]}
    return [Case(form, (n,), torch.float32, "step", BYTES * n) for form, n in sizes.items()]


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """The parameters, then their gradients."""
    (parameters,) = case.shape
    sizes = [parameters]
    if case.form == "292 tensors":
        sizes = next(s for s in map(gpt2_medium, (1, 8, 64)) if sum(s) == parameters)
    tensors = [torch.randn(n, device=device) for n in (*sizes, *sizes)]
    return *(p.requires_grad_() for p in tensors[: len(sizes)]), *tensors[len(sizes) :]


def call(case: Case, function: Function, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    params = inputs[: len(inputs) // 2]
    for p, grad in zip(params, inputs[len(params) :], strict=True):
        p.grad = grad
    return function(params)


def with_scaler(scaler_type: type[torch.amp.GradScaler], device: torch.device) -> torch.amp.GradScaler:
    """At a scale of 1 throughout, since the gradients are not scaled."""
    scaler = scaler_type(device.type, init_scale=1.0, growth_interval=2**31 - 1)
    scaler.scale(torch.ones((), device=device))
    return scaler


def torch_step(params: tuple[Tensor, ...], **kind: bool) -> Callable[[], None]:
    device = params[0].device
    scaler = with_scaler(torch.amp.GradScaler, device)
    optimizer = torch.optim.AdamW(params, capturable=device.type == "cuda", **kind)

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def memkern_step(params: tuple[Tensor, ...]) -> Callable[[], None]:
    scaler = with_scaler(memkern.amp.GradScaler, params[0].device)
    optimizer = memkern.optim.AdamW(params, max_grad_norm=MAX_NORM)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


FAMILY = Family(
    name="optim",
    formula=f"bytes: {BYTES} a parameter; torch eager is AdamW(fused=True) after unscale_ and clip_grad_norm_",
    cases=cases,
    inputs=inputs,
    baseline=lambda case: partial(torch_step, fused=True),
    fused=lambda case: memkern_step,
    peers={"torch foreach": lambda case: partial(torch_step, foreach=True)},
    call=call,
    compiles=False,
)

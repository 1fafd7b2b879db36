"""The bytes that a step moves through memory, and its launches, counted by the emulator on the CUDA sources."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import memkern
from benchmarks.optim import gpt2_medium
from memkern.optim import LAMB, SGD, AdamW, Lion
from tests import emulator

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=f"emulator: {emulator.unavailable()}")
N = 40_000


def launches_of_a_step(make, params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """What the second step under our scaler launches; the first makes the states."""
    emulator.load()
    with memkern.backend("emulated"):
        scaler = memkern.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        optimizer = make(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            with emulator.counting() as launches:
                scaler.step(optimizer)
                scaler.update()
    assert int(optimizer.skipped_steps) == 0
    return launches


def moved(launches: list[dict[str, Any]]) -> int:
    return sum(launch["loaded"]["bytes"] + launch["stored"]["bytes"] for launch in launches)


def fp32(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(n)) for n in sizes]


def half(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(n, dtype=torch.float16)) for n in sizes]


def clipped(kind, **more):
    return lambda params: kind(params, max_grad_norm=1.0, **more)


MASTERS = {"master_weights": torch.float32}


@pytest.mark.parametrize(
    ("make", "params", "bytes_a_parameter"),
    (
        # unscale, finite check and clip included: the gradient twice, parameter and two moments in and out
        (clipped(AdamW), fp32, 32),
        # the 16-bit gradient twice, master and two moments in and out, the 16-bit parameter out
        (clipped(AdamW, **MASTERS), half, 30),
        (clipped(AdamW, amsgrad=True), fp32, 40),
        (clipped(SGD, momentum=0.9), fp32, 24),
        (clipped(SGD), fp32, 16),
        (clipped(Lion), fp32, 24),
        (clipped(Lion, **MASTERS), half, 22),
        (clipped(LAMB), fp32, 48),  # everything that is read, once more for the norms
        (clipped(AdamW, write_unscaled_grads=True), fp32, 36),
    ),
)
def test_bytes_a_parameter(make, params, bytes_a_parameter) -> None:
    launches = launches_of_a_step(make, params(N, N))
    chunks = sum(
        launch["grid"] for launch in launches if "check_kernel" in launch["kernel"] and "finish" not in launch["kernel"]
    )
    own = 2 * 8 * chunks + 12  # sums of the chunks, out and in, and the three results
    if make([torch.nn.Parameter(torch.ones(1))]).__class__ is LAMB:
        steps = next(launch["grid"] for launch in launches if "lamb_norm" in launch["kernel"])
        own += 2 * 16 * steps + 8 * 2
    assert moved(launches) == bytes_a_parameter * 2 * N + own
    assert own < 0.01 * moved(launches)


@pytest.mark.parametrize("params", (fp32, half))
def test_accesses_are_coalesced(params) -> None:
    """No memory sector is touched for nothing."""
    for launch in launches_of_a_step(clipped(AdamW, **MASTERS), params(N, N)):
        for direction in ("loaded", "stored"):
            assert launch[direction]["sectors"] == launch[direction]["sectors_needed"]
            if launch[direction]["bytes"] > N:
                # 16 bytes a lane for fp32, 8 for the 16-bit tensors beside it; the check has 16 for either
                assert launch[direction]["bytes"] / launch[direction]["warp_accesses"] > (
                    500 if params is fp32 else 350
                )


def test_launches_for_gpt2_medium() -> None:
    sizes = gpt2_medium(16384)
    assert len(sizes) == 292
    assert sum(gpt2_medium(1)) == 354_823_168
    for params in (fp32, half):
        launches = launches_of_a_step(clipped(AdamW, **MASTERS), params(*sizes))
        kernels = [launch["kernel"].split("::")[-1].split("(")[0] for launch in launches]
        assert len(launches) == 4, kernels


def test_a_skipped_step_moves_next_to_nothing() -> None:
    """Its kernels return at once; the check alone has read the gradients."""
    params = fp32(N)
    emulator.load()
    with memkern.backend("emulated"):
        optimizer = AdamW(params)
        params[0].grad = torch.full((N,), math.inf)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
        with emulator.counting() as launches:
            optimizer.step()
    assert moved(launches) < 4 * N + 200
    assert int(optimizer.skipped_steps) == 1

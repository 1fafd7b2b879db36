"""The optimizers' Triton kernels: they compile for GPUs, without one, and their launches do not grow in number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memkern
from benchmarks.optim import gpt2_medium
from memkern.optim import LAMB, AdamW

pytest.importorskip("triton", reason="triton is not installed")


def without_the_interpreter(code: str) -> list[str]:
    """What the code prints, line by line."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from memkern.triton import optim
from tests.optim_steps import ALGORITHMS, DTYPES, Tensors

class Driver:  # a GPU as far as compiling for it goes
    def get_current_target(self):
        return GPUTarget("cuda", capability, 32)
    def get_current_device(self):
        return capability
    def get_current_stream(self, device):
        return 0

def compiled(kernel, grid, x, *arguments, **meta):
    assembly = kernel.warmup(*arguments, grid=grid, **meta).asm
    assert len(assembly["cubin"]) > 0
    aligned = "aligned" if meta.get("ALIGNED") else ""
    print(capability, kernel.fn.__name__, aligned, "vectors" if "ld.global.v4" in assembly["ptx"] else "elements")

optim.launch = compiled
driver.set_active(Driver())
one = torch.ones(())
for capability in (80, 90):
    optim.advance([one], None, one)
    for algorithm in ALGORITHMS.values():
        for dtypes in (DTYPES[0], DTYPES[5], DTYPES[7]):
            t = Tensors.random(algorithm, dtypes, "cpu", sizes=(16, 5))
            optim.check_and_norm(t.grads, one, 1.0)
            optim.IMPLEMENTATIONS[algorithm.op](*t.arguments(algorithm, True, True, None, grad_scale=one))
"""


def test_kernels_compile_for_sm_80_and_sm_90() -> None:
    """As the ops launch them. Where all is aligned, 16 bytes are read at a time."""
    lines = [line.split() for line in without_the_interpreter(COMPILE)]
    kernels = {"square_sum", "finish_check", "advance", "step", "lamb_norm", "lamb_ratio"}
    for capability in ("80", "90"):
        assert {line[1] for line in lines if line[0] == capability} == {f"{name}_kernel" for name in kernels}
    assert {line[-1] for line in lines if "aligned" in line} == {"vectors"}
    assert {line[-1] for line in lines if "aligned" not in line} == {"elements"}


def test_ops_register_without_the_interpreter() -> None:
    """As ops that write what their schemas say. (Their kernels cannot run here, and are named only.)"""
    lines = without_the_interpreter("""
import torch, memkern.triton
from memkern.triton import optim

optim.launch = lambda kernel, *arguments, **meta: print(kernel.fn.__name__)
memkern.triton.register()
op, x, one = torch.ops.memkern_triton, [torch.ones(4)], torch.ones(())
op.advance(x[:0], one.long(), one)
op.advance([one], None, None)
op.check_and_norm(x, None, 1.0)
op.lion_step(x, x, x, [], None, one, None, None, 0.1, 0.9, 0.9, 0.0, False, False)
print(x[0]._version > 0)
""")
    kernels = ["advance_kernel", "advance_kernel", "square_sum_kernel", "finish_check_kernel", "step_kernel"]
    assert lines == [*kernels, "True"]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels launched."""
    if memkern.backends.unavailable("triton"):
        pytest.skip(f"triton: {memkern.backends.unavailable('triton')}")
    from memkern.triton import optim

    launched = []

    def count(kernel, *arguments, **meta):
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **meta)

    launch = optim.launch
    monkeypatch.setattr(optim, "launch", count)
    return launched


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(make_optimizer, sizes: list[int], dtype: torch.dtype) -> None:
    with memkern.backend("triton"):
        scaler = memkern.amp.GradScaler(DEVICE, init_scale=4.0)
        scaler.scale(torch.ones((), device=DEVICE))
        params = [torch.nn.Parameter(torch.ones(n, dtype=dtype, device=DEVICE)) for n in sizes]
        optimizer = make_optimizer(params, max_grad_norm=1.0, master_weights=torch.float32)
        for p in params:
            p.grad = torch.ones_like(p)
        scaler.step(optimizer)
        scaler.update()
        assert int(optimizer.skipped_steps) == 0 and not any((p == 1).any() for p in params)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_launches_for_gpt2_medium(launches, dtype) -> None:
    sizes = [16 * n for n in gpt2_medium(2**20)]
    step(AdamW, sizes, dtype)
    assert len(sizes) == 292
    assert launches == ["square_sum_kernel", "finish_check_kernel", "advance_kernel", "step_kernel"]


def test_launches_do_not_grow_with_the_number_of_tensors(launches, make_optimizer) -> None:
    """Nor with their sizes: those that 16 bytes divide, and the others."""
    counts = []
    for sizes in ([16, 5], [16, 5, 0, 32, 7, 1] * 3):
        launches.clear()
        step(make_optimizer, sizes, torch.float32)
        counts.append(len(launches))
    is_lamb = type(make_optimizer([torch.nn.Parameter(torch.ones(1))])) is LAMB
    assert counts[0] == counts[1] <= (10 if is_lamb else 6)


def test_elements_past_2_to_the_31(launches) -> None:
    """Offsets have 64 bits: a tensor that begins 2^31 elements before the few of it that there are."""
    from memkern.triton import multi_tensor as mt
    from memkern.triton import optim

    far, n = 2**31, 9
    x = torch.full((n,), 2.0, device=DEVICE)
    shared = optim._shared(x, None, None, None, None, 0.0, False)
    table, _ = mt.table_of(x, shared, [(1, [0]), (far + n, [x.data_ptr() - 4 * far])])
    chunks_before = mt.SHARED.value + mt.END.value
    table[chunks_before] = -far // mt.CHUNK.value  # so that the first program finds itself that far in
    sums = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    optim.launch(optim.square_sum_kernel, (1,), x, table, sums, DTYPE=mt.TYPES[x.dtype], ALIGNED=False, BLOCK=mt.BLOCK)
    assert float(sums) == 4 * n

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
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memkern.triton import optim
from memkern.triton.optim_formulas import ADAM, AMSGRAD, LAMB, LION, MOMENTUM, SGD

ARGUMENTS = {"table": "*i64", "sums": "*fp64", "ratios": "*fp32", "result": "*fp32", "count": "i32"}
F32, MIXED = (tl.float32,) * 6, (tl.float32, tl.bfloat16, tl.float16, tl.bfloat16, tl.float16, tl.float32)

def show(name, capability, variant="", **constants):
    kernel = getattr(optim, name)
    signature = {argument: ARGUMENTS.get(argument, "constexpr") for argument in kernel.arg_names}
    constants |= {"BLOCK": optim.BLOCK}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(compiled.asm["cubin"]) > 0
    print(capability, name, variant, "vectors" if "ld.global.v4" in compiled.asm["ptx"] else "elements")

for capability in (80, 90):
    for name in ("finish_check_kernel", "advance_kernel", "lamb_ratio_kernel"):
        show(name, capability)
    for aligned in (True, False):
        for dtype in (tl.float16, tl.bfloat16, tl.float32):
            show("square_sum_kernel", capability, f"{aligned}", DTYPE=dtype, ALIGNED=aligned)
        for dtypes in (F32, MIXED):
            show("lamb_norm_kernel", capability, f"{aligned}", DTYPES=dtypes, ALIGNED=aligned)
            for pair, states in ((SGD, 0), (MOMENTUM, 1), (LION, 1), (ADAM, 2), (LAMB, 2), (AMSGRAD, 3)):
                used = dtypes[:3 + states]
                show("step_kernel", capability, f"{aligned}", SCALARS=pair[0], UPDATE=pair[1], WRITE=True,
                     DTYPES=used + (None,) * (6 - len(used)), ALIGNED=aligned)
"""


def test_kernels_compile_for_sm_80_and_sm_90() -> None:
    """Aligned tensors are read 16 bytes at a time."""
    lines = without_the_interpreter(COMPILE)
    assert len(lines) == 2 * (3 + 2 * (3 + 2 * 7))
    assert all(line.endswith("vectors") for line in lines if "True" in line)
    assert not any(line.endswith("vectors") for line in lines if "False" in line)


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

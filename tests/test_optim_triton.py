"""The Triton kernels of the optimizers compile for GPUs, ahead of time and without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memkern.triton import optim

FLAGS = {"COPY": True, "WRITE": True, "AMSGRAD": True, "MOMENTUM": True, "NESTEROV": True}
FP32 = ("shared_ptr", "corrections_ptr", "sums_ptr", "trust_ptr", "step_ptr", "u_ptr", "w_ptr")
KERNELS = ("square_sum_kernel", "adam_kernel", "sgd_kernel", "lamb_direction_kernel", "lamb_kernel", "lion_kernel")

def source(kernel, narrow):
    signature, constants = {}, {}
    for name in kernel.arg_names:
        if name == "BLOCK":
            constants[name] = optim.BLOCK
        elif name in FLAGS:
            constants[name] = FLAGS[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FP32 else f"*{narrow}"
        else:
            signature[name] = "i64" if name in ("n", "first") else "fp32"
    return ASTSource(kernel, signature, constexprs=constants)

for capability in (80, 90):
    for name in KERNELS:
        for narrow in ("fp16", "bf16", "fp32"):
            compiled = triton.compile(source(getattr(optim, name), narrow), target=GPUTarget("cuda", capability, 32))
            print(capability, name, narrow, len(compiled.asm["cubin"]) > 0)
"""


def test_kernels_compile_for_sm_80_and_sm_90() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == 2 * 6 * 3


def test_ops_that_write_register_without_the_interpreter() -> None:
    """What triton_op is told to be written is what the schema says. (advance has no kernel.)"""
    pytest.importorskip("triton", reason="triton is not installed")
    code = (
        "import torch, memkern.triton; memkern.triton.register();"
        "steps, skipped = [torch.zeros(()), torch.ones(())], torch.zeros((), dtype=torch.int64);"
        "torch.ops.memkern_triton.advance(steps, skipped, None);"
        "torch.ops.memkern_triton.advance(steps, skipped, torch.ones(()));"
        "print(*map(int, (*steps, skipped)))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert run.stdout == "1 2 1\n", run.stderr[-3000:]

"""The Triton softmax kernels, compiled for GPUs that need not be here, and their launch options."""

from __future__ import annotations

import pytest

from tests.triton_compile import check_compiled

pytest.importorskip("triton", reason="Triton is not installed")

# Without TRITON_INTERPRET, which this process may have set and which Triton reads once.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memkern.triton import softmax

FLAGS = {"ADDITIVE": False, "LOG": False, "CAUSAL": False, "ZERO_MASKED": False, "NARROW": True}
REALS = ("scale", "sign", "factor")

def compiled(kernel, n, x="fp16", y=None, mask=None, inner=1, dropout=False, **flags):
    launch = softmax._blocks(n, inner)
    y = y or x
    pointers = {"x_ptr": x, "dx_ptr": x, "mask_ptr": mask, "y_ptr": y, "dy_ptr": y,
                "dropped_ptr": y if dropout else None, "seed_ptr": "i64" if dropout else None}
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name], constants[name] = "constexpr", {**FLAGS, **launch, **flags}[name]
        elif name.endswith("_ptr"):
            signature[name] = "*" + pointers[name] if pointers[name] else "constexpr"
            if pointers[name]:
                aligned[i,] = [["tt.divisibility", 16]]
            else:
                constants[name] = None
        elif name == "key_stride" or name == "inner" and inner == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "fp32" if name in REALS else "i64" if name == "threshold" else "i32"
            if name in ("n", "inner", "stride_0", "stride_1", "stride_2"):
                aligned[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    asm = triton.compile(source, target=target, options={"num_warps": launch["num_warps"]}).asm["ptx"]
    return {"target": f".target sm_{sys.argv[1]}" in asm, "wide": ".v4.b32" in asm, "local": ".local" in asm,
            "fp64": "f64" in asm}

forward, backward = softmax._forward_kernel, softmax._backward_kernel
report = {}
for n in (64, 1024, 8192, 20_000):
    for x in ("fp16", "bf16", "fp32"):
        report[f"forward {n} {x}"] = compiled(forward, n, x, NARROW=x != "fp32")
        report[f"backward {n} {x}"] = compiled(backward, n, x)
for n in (1024, 20_000):
    report[f"bool mask {n}"] = compiled(forward, n, mask="u8", CAUSAL=True, ZERO_MASKED=True)
    report[f"additive mask {n}"] = compiled(forward, n, "bf16", mask="bf16", ADDITIVE=True, dropout=True)
    report[f"causal backward {n}"] = compiled(backward, n, CAUSAL=True, dropout=True)
    report[f"log to fp32 {n}"] = compiled(forward, n, "fp16", "fp32", LOG=True, NARROW=False)
    report[f"log from fp32 {n}"] = compiled(backward, n, "fp16", "fp32", LOG=True)
    report[f"inner {n}"] = compiled(forward, n, inner=64)
    report[f"inner backward {n}"] = compiled(backward, n, inner=64)
print(json.dumps(report))
"""


@pytest.mark.parametrize("capability", (80, 90))
def test_compiles_with_wide_accesses_and_no_local_memory(capability: int) -> None:
    check_compiled(COMPILE, capability, kernels=38)


def test_launch_options_follow_the_row() -> None:
    from memkern.triton import softmax

    for inner in (1, 2, 64, 4099):
        for n in (1, 2, 16, 65, 512, 513, 1024, 4097, softmax.LONGEST, softmax.LONGEST + 1, 10**6):
            options = softmax._blocks(n, inner)
            block, rows, warps = options["BLOCK"], options["ROWS"], options["num_warps"]
            assert options["LONG"] == (n > (softmax.LONGEST if inner == 1 else softmax.LONGEST_INNER))
            if not options["LONG"]:
                assert block >= n and (block == 16 or block < 2 * n)
            assert inner == 1 or rows >= softmax.FEWEST_ROWS
            assert max(softmax.TILE, block) <= rows * block <= 2 * softmax.TILE
            assert rows * block / (32 * warps) == 16  # elements a thread

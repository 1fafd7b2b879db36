"""The Triton norm kernels, compiled for GPUs that need not be here, and their launch options."""

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
from memkern.triton import norm

FP32 = ("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr", "weight_ptr", "bias_ptr")
FLAGS = {"EPS": 1e-5, "CENTRED": True, "ZERO_CENTRED": False, "FROM_Y": False}

def compiled(kernel, dtype, capability, launch, absent=(), **flags):
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in absent or name.isupper():
            signature[name] = "constexpr"
            constants[name] = None if name in absent else {**FLAGS, **launch, **flags}[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FP32 else "*" + dtype
            aligned[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            aligned[i,] = [["tt.divisibility", 16]] if name == "columns" else []
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": launch["num_warps"]}
    asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return {"target": f".target sm_{capability}" in asm, "wide": ".v4.b32" in asm, "local": ".local" in asm,
            "fp64": "f64" in asm}

capability = int(sys.argv[1])
report = {}
for columns in (64, 1024, 8192):
    for dtype in ("fp16", "bf16", "fp32"):
        key, launch = f"{columns} {dtype}", norm._blocks(columns)
        report["forward " + key] = compiled(norm._forward_kernel, dtype, capability, launch)
        report["backward " + key] = compiled(norm._backward_kernel, dtype, capability, launch)
launch = norm._blocks(1024)
bare = ("residual_ptr", "weight_ptr", "bias_ptr", "summed_ptr", "mean_ptr")
report["rms"] = compiled(norm._forward_kernel, "bf16", capability, launch, bare, CENTRED=False)
no_dx = ("dsummed_ptr", "bias_ptr", "mean_ptr", "dx_ptr", "dbias_ptr")
flags = {"CENTRED": False, "ZERO_CENTRED": True, "FROM_Y": True}
report["rms weights"] = compiled(norm._backward_kernel, "bf16", capability, launch, no_dx, **flags)
report["long forward"] = compiled(norm._long_forward_kernel, "bf16", capability, norm.LONG)
report["long dx"] = compiled(norm._long_dx_kernel, "bf16", capability, norm.LONG)
print(json.dumps(report))
"""


@pytest.mark.parametrize("capability", (80, 90))
def test_compiles_with_wide_accesses_and_no_local_memory(capability: int) -> None:
    check_compiled(COMPILE, capability, kernels=22)


def test_launch_options_follow_the_columns() -> None:
    from memkern.triton import norm

    for columns in (1, 2, 64, 65, 1023, 1024, 4097, norm.LONGEST):
        options = norm._blocks(columns)
        block, rows, warps = options["BLOCK"], options["ROWS"], options["num_warps"]
        assert block >= columns and (block == 16 or block < 2 * columns)
        assert rows * block == max(norm.TILE, block)
        assert rows * block / (32 * warps) == 16  # elements a thread

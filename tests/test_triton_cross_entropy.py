"""The Triton kernels of cross-entropy and distillation, compiled for GPUs that need not be here, and their launch
options."""

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
from memkern.triton import cross_entropy as ce

FP32 = ("dloss_ptr", "lse_ptr", "teacher_lse_ptr", "loss_ptr", "weight_ptr")
PLAIN = {"PROBABILITIES": False, "SMOOTHING": 0.0, "Z_LOSS": 0.0, "SOFTCAP": 0.0}
ALL = {"SMOOTHING": 0.1, "Z_LOSS": 1e-4, "SOFTCAP": 30.0}
BOTH_WAYS = (ce._forward_kernel, ce._backward_kernel)
OF_TEACHER = (ce._distillation_forward_kernel, ce._distillation_backward_kernel)

def compiled(kernel, dtype, classes, weight=True, **flags):
    launch = ce._blocks(classes)
    flags = {**launch, **PLAIN, "INVERSE": 0.5, **flags}
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name.isupper() or (name == "weight_ptr" and not weight):
            signature[name] = "constexpr"
            constants[name] = flags.get(name)
        elif classes == 1 and (name == "classes" or name.endswith("stride")):
            signature[name] = "constexpr"  # as Triton takes every 1
            constants[name] = 1
        elif name.endswith("_ptr"):
            of_index = name == "target_ptr" and not flags["PROBABILITIES"]
            signature[name] = "*i64" if of_index else "*fp32" if name in FP32 else "*" + dtype
            aligned[i,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            aligned[i,] = [["tt.divisibility", 16]] if name == "classes" or name.endswith("stride") else []
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": launch["num_warps"]}
    asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return {"target": f".target sm_{capability}" in asm, "wide": ".v4.b32" in asm or classes == 1,
            "local": ".local" in asm, "fp64": "f64" in asm}

capability = int(sys.argv[1])
report = {}
for classes in (1000, 50_256):
    for dtype in ("fp16", "bf16", "fp32"):
        for kernel in BOTH_WAYS:
            report[f"{kernel.__name__} {classes} {dtype}"] = compiled(kernel, dtype, classes, weight=False)
        for kernel in OF_TEACHER:
            report[f"{kernel.__name__} {classes} {dtype}"] = compiled(kernel, dtype, classes)
for kernel in BOTH_WAYS:
    for name, flags in (("classes", ALL), ("probabilities", {**ALL, "PROBABILITIES": True})):
        for classes in (1, 50_256):
            report[f"{kernel.__name__} {name} {classes}, all options"] = compiled(kernel, "bf16", classes, **flags)
print(json.dumps(report))
"""


@pytest.mark.parametrize("capability", (80, 90))
def test_compiles_with_wide_accesses_and_no_local_memory(capability: int) -> None:
    check_compiled(COMPILE, capability, kernels=32)


def test_launch_options_follow_the_classes() -> None:
    from memkern.triton import cross_entropy

    for classes in (0, 1, 2, 64, 65, 1023, 1024, 4097, 262_144):
        options = cross_entropy._blocks(classes)
        block, rows, warps = options["BLOCK"], options["ROWS"], options["num_warps"]
        assert block in (16, cross_entropy.TILE) or classes <= block < 2 * classes
        assert rows * block == cross_entropy.TILE
        assert rows * block / (32 * warps) == 16  # elements a thread

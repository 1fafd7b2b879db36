"""What the compilers say of the CUDA and Triton kernels, and of the libraries that hold them. No GPU is needed."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tool(name: str) -> str:
    """A CUDA binary tool: from PATH, else the one that comes with Triton."""
    triton = importlib.util.find_spec("triton")
    bundled = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name if triton else None
    found = shutil.which(name) or (str(bundled) if bundled and bundled.exists() else None)
    return found or pytest.skip(f"no {name} here")


def library(name: str) -> Path:
    path = ROOT / "memkern" / f"_{name}.so"
    return path if path.exists() else pytest.skip(f"{path.name} was not built")


def test_no_spills_and_no_stack_frames() -> None:
    report = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", library("cuda")], capture_output=True, text=True
    )
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report.stdout)
    assert len(kernels) >= 32
    assert [k for k in kernels if int(k[2]) or int(k[4])] == []


@functools.cache
def kernels_and_code() -> list[str]:
    """The machine code of each kernel, after its name."""
    code = subprocess.run([tool("cuobjdump"), "-sass", library("cuda")], capture_output=True, text=True).stdout
    return code.split("Function : ")[1:]


def test_packs_are_stored_whole() -> None:
    """nvcc may split a 16-byte store into narrow ones, which the emulator does not see."""
    found = {"pointwise": 0, "cross-entropy": 0}
    for function in kernels_and_code():
        kernel = re.match(r"\S*?(pointwise_kernel|cross_entropy_cu\S*backward_kernel)I\S*?Li([48])E", function)
        if kernel is None:
            continue
        stores = re.findall(r"STG\.E\.?(\w*) ", function)
        single = "U16" if kernel[2] == "8" else ""  # before and after the packs
        assert set(stores) == {"128", single} and stores.count(single) == 1, (kernel[0], stores)
        found["pointwise" if kernel[1] == "pointwise_kernel" else "cross-entropy"] += 1
    assert all(found.values()), found


def test_packs_of_softmax_are_stored_whole() -> None:
    """16 bytes at a time; 8 where dx has half the bytes of dy."""
    found = set()
    for function in kernels_and_code():
        kernel = re.match(r"\S*softmax_cu\S*?((?:for|back)ward_(?:rows|inner)(?:_looped)?)I([^L]*)Li[48]E", function)
        if kernel is None:
            continue
        halves_to_fp32 = kernel[1].startswith("backward") and re.fullmatch(r"\d+__(half|nv_bfloat16)f", kernel[2])
        stores = set(re.findall(r"STG\.E\.?(\w*) ", function))
        assert stores == {"64" if halves_to_fp32 else "128"}, (kernel[0], stores)
        found.add(kernel[1])
    assert len(found) == 8, found


def test_packs_of_the_optimizers_are_whole() -> None:
    """16 bytes of fp32 at a time and 8 of the 16-bit types, in every list; of gradients to check, 16 of any type."""
    states = {"4AdamILb0EE": 2, "4AdamILb1EE": 3, "3SgdILb0EE": 0, "3SgdILb1EE": 1, "4Lion": 1, "4Lamb": 2}
    # Read, and written: there a copy too.
    lists = {f"step_kernelINS0_{name}EfE": (n + 2, n + 3) for name, n in states.items()}
    lists |= {"lamb_norm_kernelIfE": (4, 0), "12check_kernelE": (4, 0)}
    found = set()
    for function in kernels_and_code():
        name = function.split(maxsplit=1)[0]
        for kernel, (read, written) in lists.items():
            if "optim_cu" in name and kernel in name:
                loads, stores = (re.findall(rf"{way}G\.E\.(128|64)\b", function) for way in ("LD", "ST"))
                assert min(loads.count("128"), loads.count("64")) >= read, name
                # fp16 and bf16 are stored apart
                assert stores.count("128") >= written and stores.count("64") >= 2 * written, name
                found.add(kernel)
    assert found == set(lists)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_libraries_need_no_particular_python_or_cuda(name: str) -> None:
    path = library(name)
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed  # or nothing would resolve
    assert "libpython" not in needed
    assert "libcudart" not in needed
    symbols = subprocess.run(["nm", "-DC", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    # PyTorch is reached through its C shims only: no C++ name of it is left open.
    assert [line for line in symbols.splitlines() if re.search(r" (c10|at|torch)::", line)] == []
    assert " aoti_torch_" in symbols


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memkern.triton import gelu

def signatures():
    for dtype, narrow in (("fp16", True), ("bf16", True), ("fp32", False)):
        for tanh in (False, True):
            meta = {"TANH": tanh, "NARROW": narrow, "BLOCK": gelu.BLOCK}
            pointer = f"*{dtype}"
            yield gelu.forward_kernel, {"x_ptr": pointer, "y_ptr": pointer, "n": "i64"}, meta
            yield gelu.backward_kernel, {"dy_ptr": pointer, "x_ptr": pointer, "dx_ptr": pointer, "n": "i64"}, meta

for capability in (80, 90):
    for kernel, signature, meta in signatures():
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
        source = ASTSource(kernel, signature, constexprs=meta, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        wide = ".v4.b32" in compiled.asm["ptx"]
        print(capability, kernel.__name__, len(compiled.asm["cubin"]), "wide" if wide else "narrow")
"""


def test_triton_kernels_compile_for_sm_80_and_sm_90() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    tool("ptxas")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 24
    assert all(line.endswith("wide") for line in lines)  # 16-byte accesses

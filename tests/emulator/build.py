"""Builds the emulator and the CUDA sources with g++, into build/emulator/<kind>/."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY, BINDINGS = "memkern_emulated.so", "memkern_emulator.so"

# What UndefinedBehaviorSanitizer's three would find, AddressSanitizer finds at the access; they double the build.
KINDS = {
    "plain": "-O2",
    "asan": "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
    " -fno-sanitize=null,object-size,pointer-overflow",
    "tsan": "-O1 -g1 -fno-omit-frame-pointer -fsanitize=thread",
}


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _cuda_include() -> Path | None:
    """The CUDA headers of $CUDA_HOME, else of Triton (which ships them), else of an installed toolkit."""
    triton = _package("triton")
    candidates = [
        *([Path(os.environ["CUDA_HOME"]) / "include"] if os.environ.get("CUDA_HOME") else []),
        *([triton / "backends" / "nvidia" / "include"] if triton else []),
        Path("/usr/local/cuda/include"),
    ]
    wanted = ("cuda_fp16.h", "cuda_bf16.h", "cuda_runtime.h", "crt/host_defines.h")
    return next((path for path in candidates if all((path / header).exists() for header in wanted)), None)


@functools.cache
def missing() -> str | None:
    """What the emulator cannot be built without and is not here, or None."""
    if platform.machine() != "x86_64":
        return f"its switch between threads is written for x86-64, not {platform.machine()}"
    if shutil.which("g++") is None:
        return "no g++"
    for package in ("ninja", "pybind11"):
        if _package(package) is None:
            return f"the Python package {package} is not installed"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's C headers are not installed"
    if _cuda_include() is None:
        return "no CUDA headers (looked in $CUDA_HOME, the triton package and /usr/local/cuda)"
    return None


def _write_rules(kind: str, folder: Path) -> None:
    import pybind11
    from ninja.ninja_syntax import Writer

    torch_dir = _package("torch")
    common = "g++ -x c++ -std=c++17 -fno-strict-aliasing -fPIC -Wall -MMD -MF $out.d -c $in -o $out"
    cuda_source = (
        f"{common} -include {HERE}/emulator.h -Wno-unknown-pragmas -DMEMKERN_EMULATED"
        " -DMEMKERN_CUDA_NAMESPACE=memkern_emulated -DMEMKERN_CUDA_KEY=CPU"
        " -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_STABLE_ONLY"
        f" -isystem {torch_dir}/include -isystem {_cuda_include()} -idirafter {HERE}/include"
    )
    with (folder / "build.ninja").open("w") as file:
        ninja = Writer(file, width=10_000)
        python = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
        for name, command in {
            "kernels": f"{cuda_source} {KINDS[kind]}",
            "scheduler": f"{cuda_source} -O2",
            "bindings": f"{common} {python} -O1",
        }.items():
            ninja.rule(name, command, description=f"emulator ({kind}): compile $in", depfile="$out.d", deps="gcc")
        link = f"g++ {KINDS[kind]} -shared $in -o $out $libraries"
        ninja.rule("link", link, description=f"emulator ({kind}): link $out")

        sources = [*sorted((ROOT / "csrc" / "cuda").glob("*.cu")), HERE / "planted.cu"]
        objects = [ninja.build(f"{source.stem}.o", "kernels", str(source))[0] for source in sources]
        objects += ninja.build("emulator.o", "scheduler", str(HERE / "emulator.cpp"))
        ninja.build(LIBRARY, "link", objects, variables={"libraries": f"-L{torch_dir}/lib -ltorch_cpu -lc10 -ldl"})
        bound = ninja.build("bindings.o", "bindings", str(HERE / "bindings.cpp"))
        beside = {"libraries": f"-L. -l:{LIBRARY} -Wl,-rpath,'$$ORIGIN'"}
        ninja.build(BINDINGS, "link", bound, implicit=LIBRARY, variables=beside)


def build(kind: str) -> Path:
    """Build one kind (``plain``, ``asan`` or ``tsan``), as far as it is not up to date, and return its folder."""
    from ninja import BIN_DIR

    if kind not in KINDS:
        raise ValueError(f"MEMKERN_EMULATOR: got {kind!r}, needs one of {', '.join(KINDS)}")
    folder = ROOT / "build" / "emulator" / kind
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        _write_rules(kind, folder)
        command = [shutil.which("ninja", path=BIN_DIR) or "ninja", "-C", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the emulator does not build:\n{done.stdout[-10_000:]}{done.stderr}")
    return folder

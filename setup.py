"""Builds csrc/ with ninja into memkern/_cpu.so and memkern/_cuda.so.

Both are plain shared libraries on PyTorch's stable ABI: one build serves every PyTorch from 2.10 and
every Python. What cannot be built is left out with one line saying why; MEMKERN_BUILD=cuda|cpu|none
asks for one outcome, and is an error where that cannot be had.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]


class CannotBuild(Exception):
    pass


def torch_paths() -> tuple[Path, bool]:
    """Where PyTorch is, and whether it is built with CUDA."""
    try:
        import torch
    except ImportError as error:
        raise CannotBuild("PyTorch is not installed in the environment that builds") from error
    return Path(torch.__file__).parent, torch.version.cuda is not None


def find_cxx() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if shutil.which(shlex.split(name)[0]):
            return name
    raise CannotBuild("no C++ compiler (g++, c++, clang++ or $CXX)")


def find_cuda_home() -> Path:
    """The CUDA toolkit: $CUDA_HOME, else nvcc on PATH, /usr/local/cuda or the PyPI packages."""
    by_hand = os.environ.get("CUDA_HOME")
    on_path = shutil.which("nvcc")
    candidates = (
        [Path(by_hand)]
        if by_hand
        else [
            *([Path(on_path).resolve().parents[1]] if on_path else []),
            Path("/usr/local/cuda"),
            *sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*")),
        ]
    )
    for home in candidates:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_fp16.h").exists():
            return home
    raise CannotBuild(f"no CUDA compiler (looked for bin/nvcc in {', '.join(map(str, candidates))})")


def gencode_flags() -> list[str]:
    """-gencode flags for $TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), else the GPUs here, else 8.0 and 9.0+PTX."""
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not wanted:
        import torch

        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        wanted = [f"{major}.{minor}" for major, minor in sorted(found)] or ["8.0", "9.0+PTX"]
    flags = []
    for arch in wanted:
        number = arch.removesuffix("+PTX").replace(".", "")
        if not number.rstrip("af").isdigit():
            raise CannotBuild(f"TORCH_CUDA_ARCH_LIST: got {arch!r}, needs numbers such as 8.0 or 9.0+PTX")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def cpu_rules() -> dict[str, object]:
    torch_dir, _ = torch_paths()
    compile_ = [
        find_cxx(),
        *STABLE_ABI,
        "-std=c++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -fno-trapping-math",
        "-Wall -Wextra -Wno-unused-parameter -Wno-psabi",
        f"-isystem {torch_dir}/include",
        "-MMD -MF $out.d -c $in -o $out",
    ]
    if platform.machine() == "x86_64":
        compile_.insert(1, "-mprefer-vector-width=512")
    link = [find_cxx(), "-shared $in -o $out", f"-L{torch_dir}/lib", "-ltorch_cpu -lc10"]
    return {"suffix": "cpp", "compile": compile_, "link": link}


def cuda_rules() -> dict[str, object]:
    torch_dir, has_cuda = torch_paths()
    if not has_cuda:
        raise CannotBuild("this PyTorch is built without CUDA")
    home = find_cuda_home()
    compile_ = [
        f"{home}/bin/nvcc",
        *STABLE_ABI,
        "-DUSE_CUDA -std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden",
        *gencode_flags(),
        "--threads 0",  # the architectures at once
        f"-isystem {torch_dir}/include",
        "-MD -MF $out.d -c $in -o $out",
    ]
    # cudart is static, so that one library serves every CUDA version of PyTorch that its driver runs.
    link = [
        f"{home}/bin/nvcc",
        "-shared -cudart static",
        f"-ccbin {find_cxx()}",
        "$in -o $out",
        f"-L{home}/lib -L{home}/lib64",
        f"-L{torch_dir}/lib",
        "-ltorch_cuda -ltorch_cpu -lc10",
    ]
    return {"suffix": "cu", "compile": compile_, "link": link}


RULES = {"cpu": cpu_rules, "cuda": cuda_rules}


def run_ninja(name: str, rules: dict[str, object], target: Path, build_dir: Path) -> None:
    """Compile csrc/<name>/* and link them into target."""
    from ninja import BIN_DIR
    from ninja.ninja_syntax import Writer

    build_dir.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (build_dir / "build.ninja").open("w") as file:
        writer = Writer(file, width=10_000)
        writer.rule(
            "compile", " ".join(rules["compile"]), description=f"compile {name} $in", depfile="$out.d", deps="gcc"
        )
        writer.rule("link", " ".join(rules["link"]), description="link $out")
        objects = []
        for source in sorted((ROOT / "csrc" / name).glob(f"*.{rules['suffix']}")):
            objects += writer.build(f"{source.stem}.o", "compile", str(source.resolve()))
        writer.build(str(target.resolve()), "link", objects)
    ninja = shutil.which("ninja", path=BIN_DIR) or "ninja"
    jobs = os.environ.get("MAX_JOBS")
    subprocess.run([ninja, "-C", str(build_dir), *(["-j", jobs] if jobs else [])], check=True)


class BuildNative(build_ext):
    def target(self, name: str) -> Path:
        where = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return where / "memkern" / f"_{name}.so"

    def run(self) -> None:
        asked = os.environ.get("MEMKERN_BUILD", "")
        if asked not in ("", "cuda", "cpu", "none"):
            raise SystemExit(f"MEMKERN_BUILD: got {asked!r}, needs cuda, cpu or none")
        for name in RULES:
            if asked == "none" or (asked == "cpu" and name == "cuda"):
                self.target(name).unlink(missing_ok=True)
                print(f"memkern: {self.target(name).name} is left out (MEMKERN_BUILD={asked})")
                continue
            try:
                run_ninja(name, RULES[name](), self.target(name), ROOT / "build" / "native" / name)
            except CannotBuild as reason:
                if asked:
                    raise SystemExit(
                        f"MEMKERN_BUILD={asked}: cannot build {self.target(name).name}: {reason}"
                    ) from reason
                print(f"memkern: {self.target(name).name} is not built: {reason}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in map(self.target, RULES) if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPython(bdist_wheel):
    """The libraries hold machine code but know no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


# One name, so that setuptools knows there is something to build; BuildNative says what.
setup(ext_modules=[Extension("memkern._native", [])], cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython})

"""setup.py: what it builds, what it leaves out and what it says."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

pytest.importorskip("ninja", reason="ninja is not installed: nothing is built here")
pytest.importorskip("setuptools", reason="setuptools is not installed: nothing is built here")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with nothing built."""
    for name in ("csrc", "memkern"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("MEMKERN_BUILD", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")}
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", *(command or ("build_ext", "--inplace"))],
        cwd=project,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


def built(project: Path) -> set[str]:
    return {path.name for path in (project / "memkern").glob("*.so")}


def fake_compiler(path: Path) -> str:
    """A compiler that makes empty files and writes down beside itself, in ``calls``, how it was called."""
    path.parent.mkdir(parents=True)
    calls = f'echo "$@" >> {path.parent}/calls'
    path.write_text(f'#!/bin/sh\n{calls}\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n: > "$2.d"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_nothing(project: Path) -> None:
    run = build(project, MEMKERN_BUILD="none")
    assert run.returncode == 0, run.stderr
    assert built(project) == set()
    assert "_cpu.so is left out (MEMKERN_BUILD=none)" in run.stdout


def test_cpu_only_then_a_wheel_for_every_python(project: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    run = build(project, MEMKERN_BUILD="cpu")
    assert run.returncode == 0, run.stderr
    assert built(project) == {"_cpu.so"}
    wheel = build(project, "bdist_wheel", MEMKERN_BUILD="cpu")
    assert wheel.returncode == 0, wheel.stderr
    (path,) = (project / "dist").glob("*.whl")
    assert "-py3-none-linux_" in path.name
    files = set(zipfile.ZipFile(path).namelist())
    assert {"memkern/_cpu.so", "memkern/nn.py", "memkern/functional/gelu.py", "memkern/triton/gelu.py"} <= files
    assert "memkern/_cuda.so" not in files


def test_no_cuda_compiler_is_one_line_and_no_failure(project: Path) -> None:
    run = build(project, CUDA_HOME="/nowhere", CXX=fake_compiler(project / "host" / "g++"))
    assert run.returncode == 0, run.stderr
    assert built(project) == {"_cpu.so"}
    said = [line for line in run.stderr.splitlines() if line.startswith("memkern: ")]
    assert len(said) == 1
    assert said[0].startswith("memkern: _cuda.so is not built: ")


def test_no_compiler_at_all_is_pure_python(project: Path) -> None:
    run = build(project, PATH="/nowhere", CUDA_HOME="/nowhere")
    assert run.returncode == 0, run.stderr
    assert built(project) == set()
    assert "_cpu.so is not built: no C++ compiler" in run.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"MEMKERN_BUILD": "gpu"}, "MEMKERN_BUILD: got 'gpu', needs cuda, cpu or none"),
        ({"MEMKERN_BUILD": "cpu", "PATH": "/nowhere"}, "MEMKERN_BUILD=cpu: cannot build _cpu.so: no C++ compiler"),
    ],
)
def test_a_forced_build_that_cannot_be_done_fails(project: Path, environment: dict[str, str], reason: str) -> None:
    run = build(project, **environment)
    assert run.returncode != 0
    assert reason in run.stderr


def test_architectures(project: Path) -> None:
    """$TORCH_CUDA_ARCH_LIST is honoured; without it and without a GPU, 8.0 and 9.0+PTX."""
    if torch.version.cuda is None:
        pytest.skip("needs a PyTorch with CUDA")
    cxx = fake_compiler(project / "host" / "g++")
    for i, (wanted, codes) in enumerate(
        [("8.6 12.0+PTX", ["sm_86", "sm_120", "compute_120"]), ("", ["sm_80", "sm_90", "compute_90"])]
    ):
        if not wanted and torch.cuda.is_available():
            continue  # then it is the GPU's own
        toolkit = project / f"toolkit{i}"
        fake_compiler(toolkit / "bin" / "nvcc")
        (toolkit / "include").mkdir()
        (toolkit / "include" / "cuda_fp16.h").touch()
        run = build(project, MEMKERN_BUILD="cuda", CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST=wanted, CXX=cxx)
        assert run.returncode == 0, run.stderr
        compiles, *_, link = (toolkit / "bin" / "calls").read_text().splitlines()
        assert [word.split(",code=")[1] for word in compiles.split() if ",code=" in word] == codes
        assert "-cudart static" in link
    bad = build(project, MEMKERN_BUILD="cuda", CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST="ampere", CXX=cxx)
    assert bad.returncode != 0
    assert "TORCH_CUDA_ARCH_LIST: got 'ampere'" in bad.stderr

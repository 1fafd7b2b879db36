"""csrc/math.h on its own, against double, compiled with and without fused multiply-add."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("flags", ["", "-march=native", "-ffp-contract=off"])
def test_formulas(tmp_path: Path, flags: str) -> None:
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    source, program = Path(__file__).with_name("math_check.cpp"), tmp_path / "math_check"
    subprocess.run([compiler, "-std=c++17", "-O2", *flags.split(), source, "-o", program], check=True)
    check = subprocess.run([program, "997"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout

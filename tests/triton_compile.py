"""Compile Triton kernels for GPUs that need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def check_compiled(script: str, capability: int, kernels: int) -> None:
    """Run ``script``, which prints what it found of that many kernels: wide accesses, no local memory, no fp64.

    In a process without TRITON_INTERPRET, which this one may have set and which Triton reads once.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report) == kernels
    for name, found in report.items():
        assert found == {"target": True, "wide": True, "local": False, "fp64": False}, name

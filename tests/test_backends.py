"""Which backend runs, and what is said when one cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memkern
from memkern import backends, ops

ROOT = Path(__file__).parents[1]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_cpu_tensors_take_the_compiled_library_else_the_reference() -> None:
    x = torch.ones(2)
    assert backends.choose(x) == ("cpu" if backends.unavailable("cpu") is None else "reference")
    assert backends.choose(torch.empty(2, device="meta")) == "reference"


def test_a_choice_by_hand_holds_inside_its_block() -> None:
    x = torch.ones(2)
    usual = backends.choose(x)
    with memkern.backend("reference"):
        assert backends.choose(x) == "reference"
        assert backends.explain(x)["reference"] == "runs: chosen by hand"
    assert backends.choose(x) == usual


def test_backward_runs_where_forward_did(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    usual = ops.op
    monkeypatch.setattr(ops, "op", lambda backend, name: asked.append((backend, name)) or usual(backend, name))
    x = torch.ones(2, requires_grad=True)
    with memkern.backend("reference"):
        y = memkern.functional.gelu(x)
    y.sum().backward()
    assert asked == [("reference", "gelu_forward"), ("reference", "gelu_backward")]


def test_an_impossible_choice_says_why() -> None:
    with pytest.raises(ValueError, match="backend: got 'fast', needs one of 'cuda', 'triton', 'cpu', 'reference'"):
        memkern.backend("fast").__enter__()
    if backends.unavailable("cuda") is None:
        with memkern.backend("cuda"), pytest.raises(RuntimeError, match="'cuda' was asked for, but it serves cuda"):
            memkern.functional.gelu(torch.ones(2))
    else:
        with pytest.raises(RuntimeError, match="backend 'cuda' cannot run here: "):
            memkern.backend("cuda").__enter__()


def test_explain_names_every_backend() -> None:
    answer = backends.explain("cpu")
    assert tuple(answer) == backends.names()
    assert [name for name, text in answer.items() if text == "runs"] == [backends.choose(torch.ones(1))]
    assert answer["cuda"] != "runs"
    assert backends.explain(torch.ones(1)) == answer


def test_environment_variable() -> None:
    program = "import torch, memkern; print(memkern.backends.choose(torch.ones(1)))"
    assert run_python(program, MEMKERN_BACKEND="reference").stdout == "reference\n"
    # A bad one does not make import fail, only use.
    assert run_python("import memkern", MEMKERN_BACKEND="fast").returncode == 0
    assert "backend: got 'fast', needs one of" in run_python(program, MEMKERN_BACKEND="fast").stderr
    off = run_python(program, MEMKERN_BACKEND="triton", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert "backend 'triton' cannot run here: no GPU" in off.stderr
    assert run_python("from memkern.__main__ import main; main(['info'])", MEMKERN_BACKEND="fast").returncode == 0


def test_a_backend_that_failed_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_loaded", backends._loaded - {"cpu"})
    monkeypatch.setattr(backends, "_HERE", Path("nowhere"))
    assert backends.unavailable("cpu") == "_cpu.so was not built (see: memkern info)"
    assert backends.choose(torch.ones(1)) == "reference"
    monkeypatch.setattr(backends, "_HERE", Path(memkern.__file__).parent)
    built = (Path(memkern.__file__).parent / "_cpu.so").exists()
    assert (backends.unavailable("cpu") is None) == built

"""Every op test runs on every backend that can run here; the others are skipped with the reason."""

from __future__ import annotations

import os

import pytest
import torch

# Without a GPU the Triton kernels run in Triton's interpreter, on CPU tensors. Set before memkern loads.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import memkern
from memkern import backends
from tests import emulator
from tests.optim_tools import OPTIMIZERS, SCALERS

BACKENDS = ("reference", "cpu", "triton", "cuda", "emulated")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", default=",".join(BACKENDS), help="comma-separated; run the op tests on these only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--backends").split(",")
        metafunc.parametrize("backend", [name for name in BACKENDS if name in asked], indirect=True)


@pytest.fixture(autouse=True)
def same_numbers_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture
def backend(request: pytest.FixtureRequest):
    """The name of the backend that every memkern call in the test runs on."""
    name = request.param
    reason = emulator.unavailable() if name == "emulated" else backends.unavailable(name)
    if name == "cuda" and not torch.cuda.is_available():
        reason = reason or "no GPU here"
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    if name == "emulated":
        emulator.load()
    with memkern.backend(name):
        yield name


@pytest.fixture
def device(backend: str) -> str:
    """The device whose tensors that backend serves."""
    return "cuda" if torch.cuda.is_available() and backend in ("cuda", "triton") else "cpu"


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest):
    """Each of memkern's optimizers: called with parameters, and arguments that all optimizers have."""
    return OPTIMIZERS[request.param]


@pytest.fixture(params=SCALERS)
def scaler(request: pytest.FixtureRequest, backend: str, device: str) -> torch.amp.GradScaler:
    """torch's or memkern's, at a scale of 4."""
    scaler = SCALERS[request.param](device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))  # creates the scale
    return scaler


@pytest.fixture
def emulated() -> None:
    """The emulator, for tests that count what its kernels move."""
    if (reason := emulator.unavailable()) is not None:
        pytest.skip(f"emulated: {reason}")
    emulator.load()

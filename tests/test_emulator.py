"""The emulator finds what it is there to find: each planted fault is caught, and its corrected twin is clean."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import emulator
from tests.op_tests import FAMILIES, op_tests

ROOT = Path(__file__).parents[1]
BLOCK = 64  # kThreads in planted.cu

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=f"emulator: {emulator.unavailable()}")


@pytest.fixture(autouse=True)
def module():
    """The emulator's Python module, in the order of threads it starts with."""
    module = emulator.load()
    module.set_order(1)
    return module


def planted(kernel: str, x: Tensor, fault: int = 0) -> Tensor:
    return torch.ops.memkern_planted.run(kernel, x, fault)


def numbers(n: int) -> Tensor:
    return torch.arange(float(n))


def reversed_blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK).flip(1).flatten()


# What each planted kernel computes without its fault.
RIGHT = {
    "reverse": reversed_blocks,
    "reverse_dynamic": reversed_blocks,
    "rounds": reversed_blocks,
    "swap_neighbours": lambda x: x.view(-1, 2).flip(1).flatten(),
    "copy": lambda x: x,
    "wide_copy": lambda x: x,
    "barrier": lambda x: x,
    "warp_sum": lambda x: x.view(-1, 32).sum(1, keepdim=True).expand(-1, 32).flatten(),
}


def size_for(kernel: str) -> int:
    return 257 if kernel.endswith("copy") else 256


@pytest.mark.parametrize("seed", (0, 1, 2))
@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_are_right(module, kernel: str, seed: int) -> None:
    module.set_order(seed)
    x = numbers(size_for(kernel))
    for _ in range(2):
        assert torch.equal(planted(kernel, x), RIGHT[kernel](x))


T = torch.arange(2 * BLOCK) % BLOCK
LANE = T % 32
INTRINSICS = {
    "shfl": T - LANE + 3,
    "shfl in groups of 4, source 5": T // 4 * 4 + 1,
    "shfl_up by 2 in groups of 8": torch.where(T % 8 < 2, T, T - 2),
    "shfl_down by 2 in groups of 8, 64 bits": torch.where(T % 8 < 6, T + 2, T),
    "shfl_xor 1, 64 bits": T ^ 1,
    "shfl_xor in two halves of a warp": torch.where(T % 2 == 1, T ^ 2, T ^ 4),
    "ballot": torch.where(T < 32, 8, 8 + 2),
    "any and all": torch.where(T < 32, 0, 2 + 1),
    "syncthreads_count": torch.full_like(T, 5),
    "syncthreads_or and _and": torch.full_like(T, 4 + 0 + 1),
    "block and grid": torch.arange(2 * BLOCK) // BLOCK * 1000 + 2 * 100 + BLOCK,
    "shfl_xor of a half": T ^ 1,
    "shfl_xor past a group of 4: earlier groups only": torch.where(T % 8 < 4, T, T ^ 4),
    "arithmetic": torch.full((2 * BLOCK,), 0.25 + 1.5 + 1 + 0),
}


@pytest.mark.parametrize("which", INTRINSICS)
def test_intrinsics(which: str) -> None:
    y = planted("intrinsic", numbers(2 * BLOCK), list(INTRINSICS).index(which))
    assert torch.equal(y, INTRINSICS[which].float())


@pytest.mark.parametrize(
    ("kernel", "fault", "message"),
    (
        ("barrier", 1, r"block \d: deadlock.* threads 0-31 wait at a block barrier, threads 32-63 have finished"),
        ("barrier", 2, r"threads 0-32 wait at a block barrier, threads 33-63 wait at a shuffle \(mask ffffffff\)"),
        ("warp_sum", 1, r"deadlock.* threads 0-4 wait at a shuffle \(mask ffffffff\), threads 5-5 have finished"),
        ("warp_sum", 2, r"thread \d+ reads lane 16 in a shuffle whose mask leaves that lane out"),
        ("warp_sum", 3, r"thread \d+ is at a warp operation whose mask leaves it out"),
        ("warp_sum", 4, r"threads 0-6 wait at a shuffle \(mask ffff\), threads 7-7 wait .* \(mask ffffffff\)"),
        ("wide_copy", 1, r"thread \d+ loads 16 bytes at 0x\w+: needs at most 16, at a multiple of their number"),
    ),
)
def test_divergence_and_misalignment_raise(kernel: str, fault: int, message: str) -> None:
    x = numbers(size_for(kernel))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message) as error:
            planted(kernel, x, fault)
        assert f"::{kernel}(float const*, float*, long, int), block " in str(error.value)
        assert torch.equal(planted(kernel, x), RIGHT[kernel](x))  # an error leaves nothing behind


def test_a_barrier_met_from_two_places_is_one_barrier() -> None:
    assert torch.equal(planted("barrier", numbers(256), 3), numbers(256))


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes"), ((0, 32, 0), (2**31, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 99 * 1024 + 1))
)
def test_a_launch_that_a_gpu_refuses_raises(grid: int, block: int, shared_bytes: int) -> None:
    message = f"no GPU launches {grid} blocks of {block} threads with {shared_bytes} bytes"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.memkern_planted.start(numbers(1), grid, block, shared_bytes)
    torch.ops.memkern_planted.start(numbers(1), 70_000, 1, 0)
    torch.ops.memkern_planted.start(numbers(1), 1, 1024, 99 * 1024)


def test_what_is_not_written_is_nan() -> None:
    y = planted("copy", numbers(257), 2)
    assert torch.equal(y[:-1], numbers(256))
    assert y[-1].isnan()


@pytest.mark.parametrize("kernel", ("reverse", "reverse_dynamic"))
def test_shared_memory_is_poisoned_for_every_block(kernel: str) -> None:
    """Threads that read before the others have written find NaN, not what the last block left."""
    planted(kernel, numbers(256))
    assert planted(kernel, numbers(256), 1).view(-1, BLOCK).isnan().any(1).all()


def test_order_follows_the_seed(module) -> None:
    def order(seed: int) -> list[float]:
        module.set_order(seed)
        return planted("place_in_order", numbers(256)).tolist()

    assert order(0) == list(range(256))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(256)) != order(1)
    blocks = torch.tensor(order(1)).view(-1, BLOCK)
    assert (blocks // BLOCK == blocks[:, :1] // BLOCK).all()  # a block runs to its end before the next
    assert blocks[:, 0].tolist() != sorted(blocks[:, 0].tolist())


def traffic(bytes: int, warp_accesses: int, sectors: int, needed: int) -> dict[str, int]:
    return {"bytes": bytes, "warp_accesses": warp_accesses, "sectors": sectors, "sectors_needed": needed}


@pytest.mark.parametrize(
    ("n", "stride", "loaded", "stored"),
    (
        # Of n/stride floats, a warp takes 32 at a time; a sector holds 8 floats.
        (1024, 1, traffic(4096, 32, 128, 128), traffic(4096, 32, 128, 128)),
        (1024, 2, traffic(2048, 16, 128, 64), traffic(2048, 16, 64, 64)),
        (1024, 8, traffic(512, 4, 128, 16), traffic(512, 4, 16, 16)),
        (1024, 0, traffic(4096, 32, 32, 32), traffic(4096, 32, 128, 128)),  # every lane reads the same float
        (1000, 1, traffic(4000, 32, 125, 125), traffic(4000, 32, 125, 125)),  # 8 lanes in the last warp
        (1, 1, traffic(4, 1, 1, 1), traffic(4, 1, 1, 1)),
    ),
)
def test_traffic_is_counted(n: int, stride: int, loaded: dict[str, int], stored: dict[str, int]) -> None:
    with emulator.counting() as launches:
        planted("strided", numbers(n), stride)
    (launch,) = launches
    assert launch["kernel"].endswith("::strided(float const*, float*, long, int)")
    assert (launch["grid"], launch["block"], launch["shared_bytes"]) == (4, BLOCK, BLOCK * 4)
    assert (launch["loaded"], launch["stored"]) == (loaded, stored)
    planted("strided", numbers(n), stride)
    assert len(launches) == 1  # counting has ended


@pytest.mark.parametrize("kernel", ("reverse_dynamic", "swap_neighbours"))
def test_shared_memory_is_not_counted(kernel: str) -> None:
    with emulator.counting() as launches:
        planted(kernel, numbers(BLOCK))
    assert launches[0]["loaded"] == launches[0]["stored"] == traffic(256, 2, 8, 8)


def test_wide_accesses_off_a_sector_boundary_touch_more() -> None:
    with emulator.counting() as launches:
        planted("wide_copy", numbers(257))
        planted("wide_copy", numbers(261)[4:])  # 16 bytes on
    aligned, shifted = (launch["loaded"] for launch in launches)
    assert aligned == traffic(1024, 2, 32, 32)
    assert shifted == traffic(1024, 2, 34, 32)


def test_calls_from_several_threads_take_turns() -> None:
    """Each OS thread has shared arrays of its own (they are thread-local), and no two launches overlap."""
    inputs = [numbers(256) + 1000 * i for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        for x, y in zip(inputs, pool.map(functools.partial(planted, "reverse"), inputs), strict=True):
            assert torch.equal(y, RIGHT["reverse"](x))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert emulator.build.missing.__wrapped__() == "no g++"
    with pytest.raises(ValueError, match="MEMKERN_EMULATOR: got 'msan', needs one of plain, asan, tsan"):
        emulator.build.build("msan")


# ---- Under sanitizers, in processes of their own


@functools.cache
def why_not(kind: str) -> str | None:
    """Why processes cannot run under this sanitizer here, or None."""
    done = run_python(kind, "-c", "print('started')")
    return None if done.stdout == "started\n" else f"{kind}: Python does not start under it: {done.stdout[-500:]}"


def run_python(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env={**emulator.environment(kind), "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )


@pytest.fixture(params=("asan", "tsan"))
def kind(request: pytest.FixtureRequest) -> str:
    if why_not(request.param) is not None:
        pytest.skip(why_not(request.param))
    return request.param


# (kernel, fault) and what its report says; a fault that only the other sanitizer sees is not run.
CAUGHT = {
    "asan": {
        ("copy", 1): r"heap-buffer-overflow .*\bcopy\b[^\n]*planted.cu:",
        ("reverse_dynamic", 2): r"heap-buffer-overflow .*\breverse_dynamic\b[^\n]*planted.cu:",
        ("reverse", 2): r"planted.cu:.*runtime error: index 64 out of bounds for type 'float \[64\]'",
        ("wide_copy", 2): r"planted.cu:.*runtime error: .*misaligned address .*requires 16 byte alignment",
    },
    "tsan": {
        ("reverse", 1): r"data race .*\breverse<64>[^\n]*planted.cu:",
        ("reverse_dynamic", 1): r"data race .*\breverse_dynamic\b[^\n]*planted.cu:",
        ("rounds", 1): r"data race .*\brounds\b[^\n]*planted.cu:",
        ("swap_neighbours", 1): r"data race .*\bswap_neighbours\b[^\n]*planted.cu:",
    },
}

RUN_PLANTED = """
import os, sys, torch
from tests import emulator
emulator.load()
for case in sys.argv[1:]:
    kernel, fault, n = case.split(":")
    print("===", kernel, fault, flush=True)
    child = os.fork()
    if child == 0:
        torch.ops.memkern_planted.run(kernel, torch.arange(float(n)), int(fault))
        os._exit(0)
    print("exit status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def planted_reports(kind: str) -> dict[tuple[str, int], str]:
    """What the process that runs each planted kernel prints, with its fault and without."""
    cases = [*((kernel, 0) for kernel in RIGHT), *CAUGHT[kind]]
    done = run_python(kind, "-c", RUN_PLANTED, *(f"{kernel}:{fault}:{size_for(kernel)}" for kernel, fault in cases))
    assert done.returncode == 0, done.stdout
    parts = done.stdout.split("=== ")[1:]
    assert len(parts) == len(cases), done.stdout
    return dict(zip(cases, parts, strict=True))


@pytest.mark.parametrize(("sanitizer", "case"), [(kind, case) for kind in CAUGHT for case in CAUGHT[kind]])
def test_sanitizers_catch_planted_faults(sanitizer: str, case: tuple[str, int]) -> None:
    if why_not(sanitizer) is not None:
        pytest.skip(why_not(sanitizer))
    report = planted_reports(sanitizer)[case]
    assert re.search(CAUGHT[sanitizer][case], report, re.DOTALL), report
    assert "exit status 0" not in report


@pytest.mark.parametrize("kernel", RIGHT)
def test_sanitizers_are_silent_about_the_twins(kind: str, kernel: str) -> None:
    assert planted_reports(kind)[kernel, 0] == f"{kernel} 0\nexit status 0\n"


# On the emulated backend. bfloat16 takes the path of float16; and what PyTorch makes of the ops is not memory's affair.
SANITIZED = "emulated and not bfloat16 and not opcheck and not compile and not derivatives"


@pytest.mark.parametrize("family", FAMILIES)
def test_op_tests_under_sanitizers(kind: str, family: str) -> None:
    """The family's tests, but the exhaustive ones."""
    done = run_python(
        kind, "-m", "pytest", *op_tests(family), "--backends", "emulated", "-k", SANITIZED, "-m", "not exhaustive",
        "-q", "-x", "-p", "no:cacheprovider",
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout

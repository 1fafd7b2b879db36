"""What the CUDA kernels of the norms move through memory, counted on the emulator."""

from __future__ import annotations

import pytest
import torch

from tests import emulator
from tests.norm_cases import each_kind
from tests.test_norm import backward, forward, random


def counted(kind: str, rows: int, width: int, dtype: torch.dtype, residual: bool = False) -> dict[str, float]:
    """Bytes an element that forward and backward move, less a sector a row for each statistic (it is read or
    written alone; on a GPU the cache holds what the rows beside it need of that sector)."""
    x, dy, other = random(3, rows, width).to(dtype)
    weight, bias = torch.ones(2, width, dtype=dtype)
    bias = bias if kind == "layer_norm" else None
    with emulator.counting() as launches:
        _, summed, *statistics = forward("emulated", kind, x, other if residual else None, weight, bias)
        backward("emulated", kind, dy, summed if residual else x, statistics, weight, bias, other if residual else None)
    moved = emulator.bytes_moved(launches, x.numel())
    for name in moved:
        if name != "finalise":
            moved[name] -= len(statistics) * 32 / width
    return moved


@pytest.mark.exhaustive
def test_bytes_moved_on_cuda(emulated) -> None:
    """x and dy are read once, for dx and for the weight gradients; partials come to at most 5 %."""
    moved = counted("layer_norm", 16_384, 1024, torch.bfloat16)
    assert list(moved) == ["forward_in_registers", "backward_in_registers", "finalise"]
    assert 4 <= moved["forward_in_registers"] <= 4.03
    assert 6 < moved["backward_in_registers"] + moved["finalise"] <= 6 * 1.05


@pytest.mark.parametrize(("rows", "width"), [(2048, 256), (2048, 768), (512, 2048), (256, 8192)])
@each_kind
def test_bytes_moved_with_a_residual(emulated, kind, rows, width) -> None:
    """Forward reads two and writes two tensors, backward reads three and writes one."""
    for dtype in (torch.float16, torch.float32):
        size = dtype.itemsize
        moved = counted(kind, rows, width, dtype, residual=True)
        # Parameters once a block where it has many rows, else once a row.
        assert 4 * size <= moved["forward_in_registers"] <= 4 * size * (1.1 if rows > 512 else 1.5)
        partials = (1 if kind == "rms_norm" else 2) * 8 / 8  # fp32, written and read, of 8 rows or more
        assert 4 * size < moved["backward_in_registers"] + moved["finalise"] <= 4 * size * 1.1 + partials


@each_kind
def test_bytes_moved_in_the_widest_rows(emulated, kind) -> None:
    """16K columns of 16 bits are still held by one block; the weight, 2 bytes twice a row, comes from a cache."""
    moved = counted(kind, 64, 16_384, torch.float16)
    partials = (1 if kind == "rms_norm" else 2) * 8 / 8  # fp32, written and read, of 8 rows
    assert list(moved) == ["forward_in_registers", "backward_in_registers", "finalise"]
    assert moved["backward_in_registers"] + moved["finalise"] <= 6 * 1.05 + 2 * 2 + partials


def test_few_rows_do_not_pay_for_a_full_grid(emulated) -> None:
    """Blocks of the backward pass, which are the partials: by rows and columns alone."""
    for rows, width, blocks in ((1, 64, 1), (64, 1024, 2), (1000, 1024, 32), (16_384, 1024, 256), (70_000, 4, 9)):
        x = torch.zeros(rows, width).half()
        weight, rstd = torch.ones(width).half(), torch.ones(rows)
        with emulator.counting() as launches:
            backward("emulated", "rms_norm", x, x, (rstd,), weight)
        assert [launch["grid"] for launch in launches] == [blocks, (width + 31) // 32]

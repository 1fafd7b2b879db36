"""One launch over many tensors: their addresses and sizes are in a table on the device.

The table is int64: ``SHARED`` entries for all its tensors, then a row of ``ROW`` entries for each. Numbers are
in it by their fp64 bits; an address of 0 is that of a tensor that was not given. A program takes a chunk of one
tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.backends import interpreting
from memkern.triton.common import on_device_of

BLOCK = 1024  # elements at a time
CHUNK = tl.constexpr(8 * BLOCK)  # elements of a program
SHARED, ROW = tl.constexpr(16), tl.constexpr(10)

ROWS = tl.constexpr(0)  # among what is shared: the number of rows
END, SIZE, LISTS = (tl.constexpr(i) for i in range(3))  # in a row: chunks up to its end, elements, then addresses

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def row_of(table, number):
    """That row, and how many chunks come before it."""
    row = table + SHARED + number * ROW
    return row, tl.load(row - ROW + END, mask=number > 0, other=0)


@triton.jit
def this_chunk(table):
    """The row of this program's tensor, and the elements it is to take: from the first to before the last."""
    program = tl.program_id(0).to(tl.int64)
    low = tl.zeros((), tl.int64)
    high = tl.load(table + ROWS) - 1
    while low < high:  # the row is the first that ends after this program
        middle = (low + high) // 2
        after = tl.load(table + SHARED + middle * ROW + END) > program
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle + 1)
    row, before = row_of(table, low)
    first = (program - before) * CHUNK
    return row, first, tl.minimum(first + CHUNK, tl.load(row + SIZE))


@triton.jit
def size_of(row, ALIGNED: tl.constexpr):
    size = tl.load(row + SIZE)
    return tl.multiple_of(size, 16) if ALIGNED else size


@triton.jit
def pointer(place, dtype: tl.constexpr, ALIGNED: tl.constexpr = False):
    """What the table has at that place, as a pointer, which with dtype None goes nowhere. ALIGNED: to 16 bytes."""
    address = tl.load(place).to(tl.pointer_type(tl.float32 if dtype is None else dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def number(place):
    """The fp64 number that the table has at that place."""
    return tl.load(place).to(tl.float64, bitcast=True)


@triton.jit
def given(place, otherwise):
    """The fp32 number whose address the table has at that place, as fp64; ``otherwise`` where it was not given."""
    address = tl.load(place)
    value = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0.0)
    return tl.where(address != 0, value.to(tl.float64), otherwise)


def bits(value: float) -> int:
    """A number as the table has it."""
    return struct.unpack("q", struct.pack("d", value))[0]


def aligned(size: int, addresses: Sequence[int]) -> bool:
    """What ``ALIGNED`` says: that all elements can be moved 16 bytes at a time."""
    return math.gcd(size, *addresses) % 16 == 0


def table_of(like: Tensor, shared: Sequence[int], rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, int]:
    """The table, on the device of ``like``, and the number of programs.

    Args:
        shared: the entries after the number of rows.
        rows: each tensor's number of elements, at least one, and addresses.
    """
    entries = [len(rows), *shared, *[0] * (SHARED.value - 1 - len(shared))]
    chunks = 0
    for size, addresses in rows:
        chunks += triton.cdiv(size, CHUNK.value)
        entries += [chunks, size, *addresses, *[0] * (ROW.value - 2 - len(addresses))]
    return on_device(like, entries), chunks


def on_device(like: Tensor, entries: list[int]) -> Tensor:
    """int64, on the device of ``like``; the host does not wait for it.

    Raises:
        RuntimeError: in a CUDA graph, which would read the host's memory again at each replay; for a GPU's tensors in
            Triton's interpreter, which reads the host's memory only.
    """
    if like.device.type == "cpu":
        return torch.tensor(entries)
    if interpreting():
        raise RuntimeError(f"Triton's interpreter: got tensors on {like.device}, needs them on the CPU")
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the Triton optimizers cannot be captured in a CUDA graph; backend 'cuda' can")
    return torch.tensor(entries, pin_memory=True).to(like.device, non_blocking=True)


def launch(kernel, grid: tuple[int, ...], x: Tensor, *arguments, **meta) -> None:
    """Start ``kernel`` on the device of ``x``; not wrapped for tracing, which it would not survive."""
    with on_device_of(x):
        kernel[grid](*arguments, **meta)

"""Softmax and log-softmax in Triton: the formulas of ``csrc/softmax.h``, which derives them.

x is seen as (outer, n, inner), softmax being over n. A row is an (outer, inner), and a tile is ROWS of them by BLOCK
of n; where inner is not 1 the rows of a tile are neighbours in memory. A row that fits BLOCK is read once; a longer
one is walked tile by tile, twice.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.ops import FAKES, check_like
from memkern.triton.common import launch, rounded, widened

TILE = 4096
# Of n that is held in one tile: of rows that lie one after the other, and of an inner dimension, whose tiles are at
# least FEWEST_ROWS wide, so that whole sectors are read.
LONGEST = 8192
LONGEST_INNER = 512
FEWEST_ROWS = 16

LOG2E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts, of which the first has 15 bits: products with an exponent are exact
LN2_HIGH = tl.constexpr(0.693145751953125)
LN2_LOW = tl.constexpr(1.4286068203094173e-06)


@triton.jit
def _exp(d, NARROW: tl.constexpr):
    """e^d for d up to about 0. The device's is off by as much as d has bits before its point: enough for 16 bits."""
    if NARROW:
        return tl.exp(d)
    else:
        d = tl.where(d < -150.0, -150.0, d)
        n = tl.floor(d * LOG2E + 0.5)
        return tl.exp2(n) * tl.exp2(((d - n * LN2_HIGH) - n * LN2_LOW) * LOG2E)


@triton.jit
def _row_start(row, n, inner):
    """Where row's first element is; the others are `inner` apart."""
    return row // inner * n * inner + row % inner


@triton.jit
def _live(row, n, queries, CAUSAL: tl.constexpr):
    """How many keys a row sees: the last query sees all."""
    live = tl.zeros(row.shape, tl.int64) + n
    if CAUSAL:
        live = row % queries + 1 + (n - queries)
    return live


@triton.jit
def _mask_start(row, size_0, size_1, stride_0, stride_1, stride_2):
    rest = row // size_0
    return row % size_0 * stride_0 + rest % size_1 * stride_1 + rest // size_1 * stride_2


@triton.jit
def _load(x_ptr, mask_ptr, at, mask_at, inside, sign):
    """sign x, and what the mask adds. x is -inf where masked or not inside."""
    x = widened(tl.load(x_ptr + at, mask=inside, other=0.0)) * sign
    added = tl.zeros(x.shape, tl.float32)
    if mask_ptr is not None:
        if mask_ptr.dtype.element_ty == tl.uint8:
            x = tl.where(tl.load(mask_ptr + mask_at, mask=inside, other=1) != 0, float("-inf"), x)
        else:
            added = widened(tl.load(mask_ptr + mask_at, mask=inside, other=0.0))
    return tl.where(inside, x, float("-inf")), added


@triton.jit
def _largest(x, added, scale, ADDITIVE: tl.constexpr):
    """Of each row the x (with ADDITIVE, the z = scale x + added) of the largest z that is not NaN."""
    z = tl.fma(x, tl.zeros(x.shape, tl.float32) + scale, added) if ADDITIVE else x
    return tl.max(tl.where(z == z, z, float("-inf")), 1)


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)[:, None]


@triton.jit
def _below(x, added, scale, top, ADDITIVE: tl.constexpr):
    """z less the largest; with ADDITIVE, z is rounded from 2^25 on."""
    shift = _finite(top)
    if ADDITIVE:
        scale = tl.zeros(x.shape, tl.float32) + scale
        z = tl.fma(x, scale, added)
        total = added - shift
        back = total - added
        lost = (added - (total - back)) - (shift + back)
        return tl.where(tl.abs(z) < 33554432.0, tl.fma(x, scale, total) + lost, z - shift)
    else:
        return (x - shift) * scale


@triton.jit
def _kept(seed_ptr, at, threshold):
    """Which elements dropout keeps: the number of element i is the (i % 4)-th of block i // 4."""
    a, b, c, d = tl.randint4x(tl.load(seed_ptr), at >> 2)
    lane = at & 3
    number = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return number.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold


@triton.jit
def _store_y(
    below, total, live, y_ptr, dropped_ptr, seed_ptr, at, column, inside, threshold, factor,
    LOG: tl.constexpr, CAUSAL: tl.constexpr, ZERO_MASKED: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    total = total[:, None]
    y = below - tl.log(total) if LOG else tl.div_rn(_exp(below, NARROW), total + tl.zeros(below.shape, tl.float32))
    if ZERO_MASKED:
        y = tl.where(total == 0, 0.0, y)
    if CAUSAL:
        y = tl.where((column[None, :] >= live[:, None]) & (total != 0), 0.0, y)
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=inside)
    if dropped_ptr is not None:
        dropped = tl.where(_kept(seed_ptr, at, threshold), y * factor, 0.0)
        tl.store(dropped_ptr + at, rounded(dropped, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _forward_kernel(
    x_ptr, mask_ptr, y_ptr, dropped_ptr, seed_ptr, rows, n, inner, queries, scale, sign, threshold, factor,
    size_0, size_1, stride_0, stride_1, stride_2, key_stride,
    ADDITIVE: tl.constexpr, LOG: tl.constexpr, CAUSAL: tl.constexpr, ZERO_MASKED: tl.constexpr,
    NARROW: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = tl.where(row < rows, _live(row, n, queries, CAUSAL), 0)
    start = _row_start(row, n, inner)[:, None]
    mask_start = _mask_start(row, size_0, size_1, stride_0, stride_1, stride_2)[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)
    if LONG:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for first in range(0, tl.max(live, 0), BLOCK):
            key = first + column
            inside = key[None, :] < live[:, None]
            at, mask_at = start + key[None, :] * inner, mask_start + key[None, :] * key_stride
            x, added = _load(x_ptr, mask_ptr, at, mask_at, inside, sign)
            before = top
            top = tl.maximum(before, _largest(x, added, scale, ADDITIVE))
            # What came before counts for less as the largest z grows.
            fall = (before[:, None] - _finite(top)) * (1.0 if ADDITIVE else scale)
            total *= tl.sum(_exp(fall, False), 1)
            total += tl.sum(_exp(_below(x, added, scale, top, ADDITIVE), NARROW), 1)
        for first in range(0, n, BLOCK):
            key = first + column
            inside = (key < n)[None, :] & (row < rows)[:, None]
            at, mask_at = start + key[None, :] * inner, mask_start + key[None, :] * key_stride
            x, added = _load(x_ptr, mask_ptr, at, mask_at, key[None, :] < live[:, None], sign)
            below = _below(x, added, scale, top, ADDITIVE)
            _store_y(below, total, live, y_ptr, dropped_ptr, seed_ptr, at, key, inside, threshold, factor,
                     LOG, CAUSAL, ZERO_MASKED, NARROW)  # fmt: skip
    else:
        at, mask_at = start + column[None, :] * inner, mask_start + column[None, :] * key_stride
        x, added = _load(x_ptr, mask_ptr, at, mask_at, column[None, :] < live[:, None], sign)
        below = _below(x, added, scale, _largest(x, added, scale, ADDITIVE), ADDITIVE)
        inside = (column < n)[None, :] & (row < rows)[:, None]
        _store_y(below, tl.sum(_exp(below, NARROW), 1), live, y_ptr, dropped_ptr, seed_ptr, at, column, inside,
                 threshold, factor, LOG, CAUSAL, ZERO_MASKED, NARROW)  # fmt: skip


@triton.jit
def _gradients(dy_ptr, y_ptr, seed_ptr, at, inside, threshold, factor):
    """The gradient before dropout, and y; 0 where not inside."""
    g = widened(tl.load(dy_ptr + at, mask=inside, other=0.0))
    if seed_ptr is not None:
        g = tl.where(_kept(seed_ptr, at, threshold), g * factor, 0.0)
    return g, widened(tl.load(y_ptr + at, mask=inside, other=0.0))


@triton.jit
def _store_dx(g, y, total, scale, dx_ptr, at, inside, LOG: tl.constexpr):
    NARROW: tl.constexpr = dx_ptr.dtype.element_ty != tl.float32
    dz = g - _exp(y, NARROW) * total[:, None] if LOG else y * (g - total[:, None])
    tl.store(dx_ptr + at, rounded(dz * scale, dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr, seed_ptr, rows, n, inner, queries, scale, threshold, factor,
    LOG: tl.constexpr, CAUSAL: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = tl.where(row < rows, _live(row, n, queries, CAUSAL), 0)
    start = _row_start(row, n, inner)[:, None]
    column = tl.arange(0, BLOCK).to(tl.int64)
    if LONG:
        total = tl.zeros((ROWS,), tl.float32)
        for first in range(0, tl.max(live, 0), BLOCK):
            key = (first + column)[None, :]
            g, y = _gradients(dy_ptr, y_ptr, seed_ptr, start + key * inner, key < live[:, None], threshold, factor)
            total += tl.sum(g if LOG else g * y, 1)
        for first in range(0, n, BLOCK):
            key = (first + column)[None, :]
            at = start + key * inner
            g, y = _gradients(dy_ptr, y_ptr, seed_ptr, at, key < live[:, None], threshold, factor)
            _store_dx(g, y, total, scale, dx_ptr, at, (key < n) & (row < rows)[:, None], LOG)
    else:
        key = column[None, :]
        at = start + key * inner
        g, y = _gradients(dy_ptr, y_ptr, seed_ptr, at, key < live[:, None], threshold, factor)
        total = tl.sum(g if LOG else g * y, 1)
        _store_dx(g, y, total, scale, dx_ptr, at, (key < n) & (row < rows)[:, None], LOG)


def _blocks(n: int, inner: int) -> dict[str, int | bool]:
    """Launch options. They follow the shape of a row only: its result is its own."""
    longest, fewest = (LONGEST, 1) if inner == 1 else (LONGEST_INNER, FEWEST_ROWS)
    long = n > longest
    block = TILE // fewest if long else max(triton.next_power_of_2(n), 16)
    rows = max(TILE // block, fewest)
    return {"LONG": long, "ROWS": rows, "BLOCK": block, "num_warps": rows * block // 512}


def _geometry(x: Tensor, dim: int) -> tuple[int, int, int]:
    """How many rows, how long, and how far apart the elements of one are."""
    shape = x.shape or (1,)
    n, inner = int(shape[dim]), math.prod(shape[dim % len(shape) + 1 :])
    return x.numel() // n, n, int(inner)


def _mask_layout(mask: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The mask, its rows' two innermost sizes and three strides, and the stride along a row."""
    dims: list[tuple[int, int]] = []  # (size, stride) of what rows are counted in, innermost first
    for size, stride in reversed(list(zip(mask.shape[:-1], mask.stride()[:-1], strict=True))):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        elif size != 1:
            dims.append((size, stride))
    if len(dims) > 3:  # more than anyone broadcasts over
        return _mask_layout(mask.contiguous())
    dims += [(1, 0)] * (3 - len(dims))
    key_stride = mask.stride(-1) if mask.dim() else 1
    sizes, strides = [size for size, _ in dims[:2]], [stride for _, stride in dims]
    return mask, (*sizes, *strides, key_stride)


def _dropout(dropout: float, seed: Tensor | None) -> tuple[Tensor | None, int, float]:
    """The seed where there is dropout, the least number that is kept, and the factor of what is."""
    return (seed, math.floor(dropout * 2**32), 1 / (1 - dropout)) if dropout > 0 else (None, 0, 1.0)


def softmax_forward(x, mask, dim, scale, causal, log, zero_masked, dropout, seed, dtype):
    if log and (mask is not None or causal or dropout > 0):
        raise ValueError("log: log-softmax takes no mask, causal or dropout")
    y, dropped = outputs = FAKES["softmax_forward"](x, mask, dim, scale, causal, log, zero_masked, dropout, seed, dtype)
    if x.numel() == 0:
        return outputs
    x = x.contiguous()
    rows, n, inner = _geometry(x, dim)
    layout: tuple[int, ...] = (1, 1, 0, 0, 0, 0)
    if mask is not None:
        mask, layout = _mask_layout(mask)
    additive = mask is not None and mask.dtype != torch.bool
    blocks = _blocks(n, inner)
    seed, threshold, factor = _dropout(dropout, seed)
    launch(
        _forward_kernel, (triton.cdiv(rows, blocks["ROWS"]),), x,
        x, mask if mask is None or additive else mask.view(torch.uint8), y, dropped if dropout > 0 else None, seed,
        rows, n, inner, int(x.shape[-2]) if causal else 1,
        abs(scale) if scale else 1.0, math.copysign(1.0, scale) if scale else 0.0, threshold, factor, *layout,
        ADDITIVE=additive, LOG=log, CAUSAL=causal, ZERO_MASKED=zero_masked, NARROW=y.itemsize == 2, **blocks,
    )  # fmt: skip
    return outputs


def _backward(dx, dy, y, dim, scale, causal, log, dropout, seed) -> None:
    check_like("dy", dy, y, of="y")
    if y.numel() == 0:
        return
    rows, n, inner = _geometry(y, dim)
    blocks = _blocks(n, inner)
    seed, threshold, factor = _dropout(dropout, seed)
    launch(
        _backward_kernel, (triton.cdiv(rows, blocks["ROWS"]),), y,
        dy.contiguous(), y.contiguous(), dx, seed, rows, n, inner, int(y.shape[-2]) if causal else 1,
        scale, threshold, factor, LOG=log, CAUSAL=causal, **blocks,
    )  # fmt: skip


def softmax_backward(dy, y, dim, scale, causal, log, dropout, seed, dtype):
    dx = FAKES["softmax_backward"](dy, y, dim, scale, causal, log, dropout, seed, dtype)
    _backward(dx, dy, y, dim, scale, causal, log, dropout, seed)
    return dx


def softmax_backward_(dy, y, dim, scale, causal, log, dropout, seed):
    if not dy.is_contiguous():
        raise ValueError("dy: needs to be contiguous, to be written over")
    _backward(dy, dy, y, dim, scale, causal, log, dropout, seed)


IMPLEMENTATIONS = {
    "softmax_forward": softmax_forward,
    "softmax_backward": softmax_backward,
    "softmax_backward_": softmax_backward_,
}

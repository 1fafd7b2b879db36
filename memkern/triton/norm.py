"""LayerNorm and RMSNorm in Triton. CENTRED tells them apart: RMSNorm has neither mean nor bias.

Up to LONGEST columns a row is one block held in registers, and a program takes as many rows at once as
fill TILE elements. Longer rows are walked block by block, more than once, without a limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.ops import FAKES, check_like
from memkern.triton.common import launch, rounded, widened

LONGEST = 8192
TILE = 4096
# Programs that share the rows in backward; each writes one row of partial weight gradients.
PROGRAMS = 256


@triton.jit
def _summed(x_ptr, residual_ptr, at, inside):
    """x + residual in fp32, as rounded to the dtype of x; or x."""
    x = widened(tl.load(x_ptr + at, mask=inside, other=0.0))
    if residual_ptr is not None:
        x += widened(tl.load(residual_ptr + at, mask=inside, other=0.0))
        x = widened(rounded(x, x_ptr.dtype.element_ty))
    return x


@triton.jit
def _weight(weight_ptr, column, inside, ZERO_CENTRED: tl.constexpr):
    weight = tl.full(column.shape, 1.0, tl.float32)
    if weight_ptr is not None:
        weight = widened(tl.load(weight_ptr + column, mask=inside, other=1.0))
        if ZERO_CENTRED:
            weight += 1.0
    return weight


@triton.jit
def _bias(bias_ptr, column, inside):
    bias = tl.zeros(column.shape, tl.float32)
    if bias_ptr is not None:
        bias = widened(tl.load(bias_ptr + column, mask=inside, other=0.0))
    return bias


@triton.jit
def _store_outputs(x, mean, correction, rstd, weight, bias, y_ptr, summed_ptr, at, inside):
    y = (x - mean - correction) * rstd * weight + bias
    tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=inside)
    if summed_ptr is not None:
        tl.store(summed_ptr + at, rounded(x, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, rows, columns,
    EPS: tl.constexpr, CENTRED: tl.constexpr, ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    x = _summed(x_ptr, residual_ptr, at, inside)
    mean = tl.zeros((ROWS,), tl.float32)
    correction = tl.zeros((ROWS,), tl.float32)  # what rounding left wrong with the mean
    if CENTRED:
        mean = tl.sum(x, 1) / columns
        correction = tl.sum(tl.where(inside, x - mean[:, None], 0.0), 1) / columns
        tl.store(mean_ptr + row, mean + correction, mask=row < rows)
    centred = tl.where(inside, x - mean[:, None] - correction[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / columns + EPS)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    weight = _weight(weight_ptr, column, column < columns, ZERO_CENTRED)
    bias = _bias(bias_ptr, column, column < columns)
    mean, correction, rstd = mean[:, None], correction[:, None], rstd[:, None]
    _store_outputs(x, mean, correction, rstd, weight[None, :], bias[None, :], y_ptr, summed_ptr, at, inside)


@triton.jit
def _long_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, columns,
    EPS: tl.constexpr, CENTRED: tl.constexpr, ZERO_CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    if CENTRED:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total += _summed(x_ptr, residual_ptr, row * columns + column, column < columns)
        mean = tl.sum(total, 0) / columns
    deviations = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _summed(x_ptr, residual_ptr, row * columns + column, column < columns)
        centred = tl.where(column < columns, x - mean, 0.0)
        deviations += centred
        squares += centred * centred
    correction = 0.0
    if CENTRED:
        correction = tl.sum(deviations, 0) / columns
        tl.store(mean_ptr + row, mean + correction)
    variance = tl.sum(squares, 0) / columns - correction * correction
    rstd = 1.0 / tl.sqrt_rn(tl.where(variance < 0, 0.0, variance) + EPS)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = _summed(x_ptr, residual_ptr, row * columns + column, inside)
        weight = _weight(weight_ptr, column, inside, ZERO_CENTRED)
        bias = _bias(bias_ptr, column, inside)
        _store_outputs(x, mean, correction, rstd, weight, bias, y_ptr, summed_ptr, row * columns + column, inside)


@triton.jit
def _statistics(mean_ptr, rstd_ptr, row, inside, CENTRED: tl.constexpr):
    rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0)
    mean = tl.zeros(rstd.shape, tl.float32)
    if CENTRED:
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0)
    return mean, rstd


@triton.jit
def _x_hat(x_ptr, at, inside, mean, rstd, weight, bias, FROM_Y: tl.constexpr):
    x = widened(tl.load(x_ptr + at, mask=inside, other=0.0))
    return (x - bias) / weight if FROM_Y else (x - mean) * rstd


# With wdy = weight dy, the gradient of y = x_hat weight + bias, x_hat = (x - mean(x)) rstd, is
#   dx = rstd (wdy - mean(wdy) - x_hat mean(wdy x_hat)),  dweight = sum over rows of dy x_hat,  dbias of dy.
# RMSNorm has no mean(x), so no mean(wdy).
@triton.jit
def _store_dx(wdy, x_hat, mean_wdy, mean_wdy_x_hat, rstd, dsummed_ptr, dx_ptr, at, inside):
    dx = (wdy - mean_wdy - x_hat * mean_wdy_x_hat) * rstd
    if dsummed_ptr is not None:
        dx += widened(tl.load(dsummed_ptr + at, mask=inside, other=0.0))
    tl.store(dx_ptr + at, rounded(dx, dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows, columns, CENTRED: tl.constexpr, ZERO_CENTRED: tl.constexpr, FROM_Y: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, j) walks every so many rows, in block j of the columns: the only one, where dx is wanted."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = _weight(weight_ptr, column, column < columns, ZERO_CENTRED)[None, :]
    bias = _bias(bias_ptr, column, column < columns)[None, :]
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        # With y there may be no mean.
        mean, rstd = _statistics(mean_ptr, rstd_ptr, row, row < rows, CENTRED and not FROM_Y)
        x_hat = _x_hat(x_ptr, at, inside, mean[:, None], rstd[:, None], weight, bias, FROM_Y)
        dy = widened(tl.load(dy_ptr + at, mask=inside, other=0.0))
        if dx_ptr is not None:
            wdy = dy * weight
            mean_wdy_x_hat = (tl.sum(wdy * x_hat, 1) / columns)[:, None]
            mean_wdy = tl.zeros((ROWS, 1), tl.float32)
            if CENTRED:
                mean_wdy = (tl.sum(wdy, 1) / columns)[:, None]
            _store_dx(wdy, x_hat, mean_wdy, mean_wdy_x_hat, rstd[:, None], dsummed_ptr, dx_ptr, at, inside)
        dweight += dy * x_hat
        dbias += dy
    partial = tl.program_id(0).to(tl.int64) * columns + column
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=column < columns)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=column < columns)


@triton.jit
def _long_dx_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, dx_ptr, columns,
    CENTRED: tl.constexpr, ZERO_CENTRED: tl.constexpr, FROM_Y: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row, which it reads twice."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = _statistics(mean_ptr, rstd_ptr, row, True, CENTRED and not FROM_Y)
    sum_wdy = tl.zeros((BLOCK,), tl.float32)
    sum_wdy_x_hat = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        weight = _weight(weight_ptr, column, inside, ZERO_CENTRED)
        bias = _bias(bias_ptr, column, inside)
        x_hat = _x_hat(x_ptr, row * columns + column, inside, mean, rstd, weight, bias, FROM_Y)
        wdy = weight * widened(tl.load(dy_ptr + row * columns + column, mask=inside, other=0.0))
        sum_wdy += wdy
        sum_wdy_x_hat += wdy * x_hat
    mean_wdy_x_hat = tl.sum(sum_wdy_x_hat, 0) / columns
    mean_wdy = 0.0
    if CENTRED:
        mean_wdy = tl.sum(sum_wdy, 0) / columns
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        at = row * columns + column
        weight = _weight(weight_ptr, column, inside, ZERO_CENTRED)
        bias = _bias(bias_ptr, column, inside)
        x_hat = _x_hat(x_ptr, at, inside, mean, rstd, weight, bias, FROM_Y)
        wdy = weight * widened(tl.load(dy_ptr + at, mask=inside, other=0.0))
        _store_dx(wdy, x_hat, mean_wdy, mean_wdy_x_hat, rstd, dsummed_ptr, dx_ptr, at, inside)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _blocks(columns: int) -> dict[str, int]:
    """Launch options for rows held in one block. They follow the columns only: a row's result is its own."""
    block = max(triton.next_power_of_2(columns), 16)
    rows = max(TILE // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": rows * block // 512}


LONG = {"BLOCK": TILE, "num_warps": TILE // 512}


def _forward(x, residual, weight, bias, columns, y, summed, mean, rstd, **options) -> None:
    """Fill y, summed (None without residual), mean (None for RMSNorm) and rstd."""
    if residual is not None:
        check_like("residual", residual, x)
    rows, columns = rstd.numel(), int(columns)
    if rows == 0:
        return
    arguments = (*_contiguous(x, residual, weight, bias), y, summed, mean, rstd)
    if columns > LONGEST:
        launch(_long_forward_kernel, (rows,), x, *arguments, columns, **options, **LONG)
    else:
        blocks = _blocks(columns)
        grid = (triton.cdiv(rows, blocks["ROWS"]),)
        launch(_forward_kernel, grid, x, *arguments, rows, columns, **options, **blocks)


def _backward(dy, dsummed, x, weight, bias, mean, rstd, columns, need_dx, need_dweight, need_dbias, **options):
    """dx, dweight and dbias; those that are not needed have no elements."""
    check_like("dy", dy, x)
    if dsummed is not None:
        check_like("dsummed", dsummed, x)
    rows, columns = rstd.numel(), int(columns)
    long = columns > LONGEST
    blocks = _blocks(min(columns, TILE) if long else columns)
    programs = min(triton.cdiv(rows, blocks["ROWS"]), PROGRAMS)
    dx = x.new_empty(x.shape if need_dx else 0)
    dweight, dbias = (
        torch.empty(programs, columns, dtype=torch.float32, device=x.device) if needed else None
        for needed in (need_dweight, need_dbias)
    )
    if rows > 0:
        dy, dsummed, *source = _contiguous(dy, dsummed, x, weight, bias, mean, rstd)
        if long and need_dx:
            launch(_long_dx_kernel, (rows,), x, dy, dsummed, *source, dx, columns, **options, **LONG)
        if not long or need_dweight or need_dbias:
            outputs = (dx if need_dx and not long else None, dweight, dbias)
            grid = (programs, triton.cdiv(columns, blocks["BLOCK"]))
            launch(_backward_kernel, grid, x, dy, dsummed, *source, *outputs, rows, columns, **options, **blocks)
    return dx, _total(dweight, weight, x), _total(dbias, bias, x)


def _total(partials: Tensor | None, parameter: Tensor | None, x: Tensor) -> Tensor:
    """The sum of the partial rows, as a gradient of ``parameter``. PyTorch sums in one order, so it repeats."""
    if partials is None:
        return x.new_empty(0)
    return partials.sum(0).to(parameter.dtype).view(parameter.shape)


def layer_norm_forward(x, residual, weight, bias, columns, eps):
    y, summed, mean, rstd = outputs = FAKES["layer_norm_forward"](x, residual, weight, bias, columns, eps)
    summed = None if residual is None else summed
    _forward(x, residual, weight, bias, columns, y, summed, mean, rstd, EPS=eps, CENTRED=True, ZERO_CENTRED=False)
    return outputs


def layer_norm_backward(
    dy, dsummed, x, weight, bias, mean, rstd, columns, from_y, need_dx, need_dweight, need_dbias
):  # fmt: skip
    needs = (need_dx, need_dweight, need_dbias)
    options = {"CENTRED": True, "ZERO_CENTRED": False, "FROM_Y": from_y}
    return _backward(dy, dsummed, x, weight, bias, mean, rstd, columns, *needs, **options)


def rms_norm_forward(x, residual, weight, columns, eps, zero_centred):
    y, summed, rstd = outputs = FAKES["rms_norm_forward"](x, residual, weight, columns, eps, zero_centred)
    summed = None if residual is None else summed
    options = {"EPS": eps, "CENTRED": False, "ZERO_CENTRED": zero_centred}
    _forward(x, residual, weight, None, columns, y, summed, None, rstd, **options)
    return outputs


def rms_norm_backward(dy, dsummed, x, weight, rstd, columns, zero_centred, from_y, need_dx, need_dweight):
    options = {"CENTRED": False, "ZERO_CENTRED": zero_centred, "FROM_Y": from_y}
    return _backward(dy, dsummed, x, weight, None, None, rstd, columns, need_dx, need_dweight, False, **options)[:2]


IMPLEMENTATIONS = {
    "layer_norm_forward": layer_norm_forward,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_forward": rms_norm_forward,
    "rms_norm_backward": rms_norm_backward,
}

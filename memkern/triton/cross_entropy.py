"""Cross-entropy and distillation in Triton: the formulas of ``csrc/cross_entropy.h``, which derives them.

A program takes as many rows as fill TILE elements, or one, which it walks block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from memkern.ops import FAKES
from memkern.triton.common import LOG2E, ROUND_64, exp_parts, launch, rounded, widened

TILE = 4096
FROM_64 = tl.constexpr(2.0**-64)
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
SMALL = tl.constexpr(0.25)  # kSmallDivergence


@triton.jit
def _exp_minus(v, rest):
    """exp(-(v + rest)) for v > -2, and that less 1; rest is what v lacks by its rounding."""
    past = v > 119.0  # exp(-119) is 0 in fp32
    v = tl.where(past, 119.0, v)
    z = v * -LOG2E + ROUND_64
    n = z - ROUND_64
    scale, c = exp_parts(z, (-v - n * 0.69314575) - (n * 1.4286068e-06 + tl.where(past, 0.0, rest)))
    scale = scale * FROM_64
    return scale + scale * c, (scale - 1.0) + scale * c


@triton.jit
def _exp_of_difference(s, lse):
    """exp(s - lse), and that less 1."""
    v = lse - s
    minus_s = v - lse
    return _exp_minus(v, (lse - (v - minus_s)) + (-s - minus_s))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= -1; for 0 <= x < 1 by the series of 2 atanh(x / (2 + x)), which tl.log is too rough for."""
    s = x / (x + 2.0)
    s2 = s * s
    p = s2 * (1.0 / 15) + 1.0 / 13
    p = p * s2 + 1.0 / 11
    p = p * s2 + 1.0 / 9
    p = p * s2 + 1.0 / 7
    p = p * s2 + 1.0 / 5
    p = p * s2 + 1.0 / 3
    p = p * s2 + 1.0
    return tl.where((x >= 0.0) & (x < 1.0), 2.0 * s * p, tl.log(x + 1.0))


@triton.jit
def _above_tangent(u):
    """exp(-u) - (1 - u) for |u| < 1/2."""
    p = u * (1.0 / 40320) - 1.0 / 5040
    p = p * u + 1.0 / 720
    p = p * u - 1.0 / 120
    p = p * u + 1.0 / 24
    p = p * u - 1.0 / 6
    p = p * u + 0.5
    return u * u * p


@triton.jit
def _shift_of(most):
    return tl.where(most == -INFINITY, 0.0, most)


@triton.jit
def _load(x_ptr, start, column, inside, other: tl.constexpr):
    return widened(tl.load(x_ptr + start + column, mask=inside, other=other))


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    """The logits s, and ds/dx."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOFTCAP != 0.0:
        e, less_one = _exp_minus(tl.abs(x) * (2.0 / SOFTCAP), 0.0)
        inverse = 1.0 / (e + 1.0)
        value = less_one * inverse * -SOFTCAP
        x = tl.where(x < 0, -value, value)
        slope = 4.0 * e * inverse * inverse
    return x, slope


@triton.jit
def _index(target_ptr, row, live, classes, ignore_index, PROBABILITIES: tl.constexpr):
    """Each row's class, whether it is ignored, and whether there is no such class."""
    index = tl.zeros(row.shape, tl.int64)
    ignored = index != 0
    invalid = index != 0
    if not PROBABILITIES:
        index = tl.load(target_ptr + row, mask=live, other=0)
        ignored = index == ignore_index
        invalid = (index < 0) | (index >= classes)
    return index[:, None], ignored, invalid


@triton.jit
def _shares(
    target_ptr, start, weight_ptr, index, column, inside, classes, PROBABILITIES: tl.constexpr, SMOOTHING: tl.constexpr
):  # fmt: skip
    q = tl.where(column == index, 1.0, 0.0)
    if PROBABILITIES:
        q = _load(target_ptr, start, column, inside, 0.0)
    if SMOOTHING != 0.0:
        q = q * (1.0 - SMOOTHING) + SMOOTHING / classes
    if weight_ptr is not None:
        q *= tl.load(weight_ptr + column, mask=column < classes, other=0.0)
    return tl.where(inside, q, 0.0)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _forward_kernel(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, lse_ptr, stride, target_stride, rows, classes, ignore_index,
    PROBABILITIES: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    index, ignored, invalid = _index(target_ptr, row, live, classes, ignore_index, PROBABILITIES)
    most = tl.full((ROWS,), -INFINITY, tl.float32)
    # Sums of exp(s - most), of those that are 1 and of the others; of the shares; of the shares (most - s).
    ones = tl.zeros((ROWS,), tl.float32)
    rest = tl.zeros((ROWS,), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    distance = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (column < classes)
        x = _load(logits_ptr, row[:, None] * stride, column, inside, 0.0)
        s = tl.where(inside, _capped(x, SOFTCAP)[0], -INFINITY)
        before = _shift_of(most)
        higher = tl.maximum(most, tl.max(s, 1))
        shift = _shift_of(higher)
        factor = _exp_minus(shift - most, 0.0)[0]
        distance += tl.where(weight != 0.0, weight * (shift - before), 0.0)
        most = higher
        e = tl.exp(s - shift[:, None])
        rest = tl.where(factor == 1.0, rest, (rest + ones) * factor) + tl.sum(tl.where(e == 1.0, 0.0, e), 1)
        ones = tl.where(factor == 1.0, ones, 0.0) + tl.sum(tl.where(e == 1.0, 1.0, 0.0), 1)
        share = _shares(
            target_ptr, row[:, None] * target_stride, weight_ptr, index, column, inside, classes, PROBABILITIES,
            SMOOTHING,
        )  # fmt: skip
        weight += tl.sum(share, 1)
        distance += tl.sum(tl.where(share != 0.0, share * (shift[:, None] - s), 0.0), 1)
    log_sum = _log1p(rest + (ones - 1.0))
    lse = most + log_sum
    loss = distance + weight * log_sum
    if Z_LOSS != 0.0:
        loss += lse * lse * Z_LOSS
    loss = tl.where(invalid, NAN, tl.where(classes == 0, 0.0, loss))
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, loss), mask=live)
    tl.store(lse_ptr + row, lse, mask=live)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _backward_kernel(
    dloss_ptr, logits_ptr, lse_ptr, target_ptr, weight_ptr, dlogits_ptr, stride, target_stride, dstride, rows, classes,
    ignore_index, PROBABILITIES: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits may be the logits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    index, ignored, invalid = _index(target_ptr, row, live, classes, ignore_index, PROBABILITIES)
    lse = tl.load(lse_ptr + row, mask=live, other=0.0)
    dloss = tl.where(invalid, NAN, tl.load(dloss_ptr + row, mask=live, other=0.0))[:, None]
    total = tl.full((ROWS,), 1.0, tl.float32)  # of the shares
    if PROBABILITIES or (SMOOTHING != 0.0 and weight_ptr is not None):
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = live[:, None] & (column < classes)
            share = _shares(
                target_ptr, row[:, None] * target_stride, weight_ptr, index, column, inside, classes, PROBABILITIES,
                SMOOTHING,
            )  # fmt: skip
            total += tl.sum(share, 1)
    elif weight_ptr is not None:
        known = live & (invalid == 0)
        total = tl.load(weight_ptr + tl.reshape(index, (ROWS,)), mask=known, other=0.0)
    if Z_LOSS != 0.0:
        total += lse * (2.0 * Z_LOSS)
    counted = (live & (ignored == 0))[:, None]
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (column < classes)
        x = _load(logits_ptr, row[:, None] * stride, column, inside & counted, 0.0)
        share = _shares(
            target_ptr, row[:, None] * target_stride, weight_ptr, index, column, inside, classes, PROBABILITIES,
            SMOOTHING,
        )  # fmt: skip
        s, slope = _capped(x, SOFTCAP)
        p, less_one = _exp_of_difference(s, lse[:, None])
        gradient = (share * less_one + p * (total[:, None] - share)) * slope * dloss
        gradient = rounded(tl.where(counted, gradient, 0.0), dlogits_ptr.dtype.element_ty)
        tl.store(dlogits_ptr + row[:, None] * dstride + column, gradient, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _distillation_forward_kernel(
    logits_ptr, teacher_ptr, loss_ptr, lse_ptr, teacher_lse_ptr, stride, teacher_stride, rows, classes,
    INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """INVERSE is 1 / temperature."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    most = tl.full((ROWS,), -INFINITY, tl.float32)
    teacher_most = tl.full((ROWS,), -INFINITY, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    teacher_total = tl.zeros((ROWS,), tl.float32)
    cross = tl.zeros((ROWS,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (column < classes)
        x = _load(logits_ptr, row[:, None] * stride, column, inside, -INFINITY)
        y = _load(teacher_ptr, row[:, None] * teacher_stride, column, inside, -INFINITY)
        higher = tl.maximum(most, tl.max(x, 1))
        teacher_higher = tl.maximum(teacher_most, tl.max(y, 1))
        shift = _shift_of(higher)
        teacher_shift = _shift_of(teacher_higher)
        moved = (shift - _shift_of(most)) - (teacher_shift - _shift_of(teacher_most))
        factor = _exp_minus((teacher_shift - teacher_most) * INVERSE, 0.0)[0]
        cross = tl.where(factor > 0.0, (cross + teacher_total * moved * INVERSE) * factor, 0.0)
        total *= _exp_minus((shift - most) * INVERSE, 0.0)[0]
        teacher_total *= factor
        most = higher
        teacher_most = teacher_higher
        d = (x - shift[:, None]) * INVERSE
        teacher_d = (y - teacher_shift[:, None]) * INVERSE
        teacher_e = tl.exp(teacher_d)
        total += tl.sum(tl.exp(d), 1)
        teacher_total += tl.sum(teacher_e, 1)
        cross += tl.sum(tl.where(teacher_e > 0.0, teacher_e * (teacher_d - d), 0.0), 1)
    loss = cross / teacher_total - tl.log(teacher_total) + tl.log(total)
    small = loss < SMALL
    if tl.sum(small.to(tl.int32), 0) > 0:
        ratio = teacher_total / total
        balance = (teacher_most - most) * INVERSE + tl.log(ratio)
        terms = tl.zeros((ROWS,), tl.float32)
        for start in range(0, classes, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = small[:, None] & (column < classes)
            x = _load(logits_ptr, row[:, None] * stride, column, inside, -INFINITY)
            y = _load(teacher_ptr, row[:, None] * teacher_stride, column, inside, -INFINITY)
            e_q = tl.exp((x - most[:, None]) * INVERSE) * ratio[:, None]
            teacher_e = tl.exp((y - teacher_most[:, None]) * INVERSE)
            u = (y - x) * INVERSE - balance[:, None]
            term = tl.where(tl.abs(u) < 0.5, teacher_e * _above_tangent(u), (e_q - teacher_e) + teacher_e * u)
            term = tl.where(teacher_e > 0.0, term, e_q)
            terms += tl.sum(tl.where(inside, term, 0.0), 1)
        loss = tl.where(small, terms / teacher_total, loss)
    tl.store(loss_ptr + row, loss, mask=live)
    tl.store(lse_ptr + row, most * INVERSE + tl.log(total), mask=live)
    tl.store(teacher_lse_ptr + row, teacher_most * INVERSE + tl.log(teacher_total), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _distillation_backward_kernel(
    dloss_ptr, logits_ptr, lse_ptr, teacher_ptr, teacher_lse_ptr, dlogits_ptr, stride, teacher_stride, rows, classes,
    INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    lse = tl.load(lse_ptr + row, mask=live, other=0.0)[:, None]
    teacher_lse = tl.load(teacher_lse_ptr + row, mask=live, other=0.0)[:, None]
    factor = tl.load(dloss_ptr + row, mask=live, other=0.0)[:, None] * INVERSE
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = live[:, None] & (column < classes)
        x = _load(logits_ptr, row[:, None] * stride, column, inside, 0.0)
        y = _load(teacher_ptr, row[:, None] * teacher_stride, column, inside, 0.0)
        d = tl.where(x == y, 0.0, (x - y) * INVERSE) - (lse - teacher_lse)
        more = d > 0.0
        larger = _exp_of_difference(tl.where(more, x, y) * INVERSE, tl.where(more, lse, teacher_lse))[0]
        difference = larger * _exp_minus(tl.abs(d), 0.0)[1]
        gradient = tl.where(more, -difference, difference) * factor
        gradient = rounded(gradient, dlogits_ptr.dtype.element_ty)
        tl.store(dlogits_ptr + row[:, None] * classes + column, gradient, mask=inside)


def _in_rows(x: Tensor) -> Tensor:
    """``x`` itself where the elements of a row lie side by side."""
    return x if x.dim() < 2 or x.shape[1] < 2 or x.stride(1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _blocks(classes: int) -> dict[str, int]:
    """Launch options. They follow the classes only: a row's result is its own."""
    block = min(max(triton.next_power_of_2(classes), 16), TILE)
    return {"ROWS": TILE // block, "BLOCK": block, "num_warps": TILE // 512}


def _launch(kernel, logits: Tensor, *arguments, **options) -> None:
    """Start ``kernel`` over the rows of ``logits``."""
    rows, classes = logits.shape
    if rows > 0:
        blocks = _blocks(classes)
        launch(kernel, (triton.cdiv(rows, blocks["ROWS"]),), logits, *arguments, **options, **blocks)


def _options(target: Tensor, label_smoothing: float, z_loss: float, softcap: float) -> dict:
    return {
        "PROBABILITIES": target.is_floating_point(), "SMOOTHING": label_smoothing, "Z_LOSS": z_loss, "SOFTCAP": softcap
    }  # fmt: skip


def cross_entropy_forward(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap):
    loss, lse = FAKES["cross_entropy_forward"](
        logits, target, weight, ignore_index, label_smoothing, z_loss, softcap
    )  # fmt: skip
    logits, target = _in_rows(logits), _in_rows(target) if target.is_floating_point() else target.contiguous()
    sizes = (logits.stride(0), target.stride(0), *logits.shape, ignore_index)
    options = _options(target, label_smoothing, z_loss, softcap)
    _launch(_forward_kernel, logits, logits, target, _contiguous(weight), loss, lse, *sizes, **options)
    return loss, lse


def _backward(dlogits, dloss, logits, lse, target, weight, ignore_index, *numbers) -> None:
    target = _in_rows(target) if target.is_floating_point() else target.contiguous()
    tensors = (dloss.contiguous(), logits, lse.contiguous(), target, _contiguous(weight), dlogits)
    sizes = (logits.stride(0), target.stride(0), dlogits.stride(0), *logits.shape, ignore_index)
    _launch(_backward_kernel, logits, *tensors, *sizes, **_options(target, *numbers))


def cross_entropy_backward(dloss, logits, *arguments):
    dlogits = FAKES["cross_entropy_backward"](dloss, logits)
    _backward(dlogits, dloss, _in_rows(logits), *arguments)
    return dlogits


def cross_entropy_backward_(dloss, logits, *arguments):
    dlogits = _in_rows(logits)
    _backward(dlogits, dloss, dlogits, *arguments)
    if dlogits is not logits:
        logits.copy_(dlogits)


def distillation_forward(logits, teacher, temperature):
    loss, lse, teacher_lse = FAKES["distillation_forward"](logits, teacher, temperature)
    logits, teacher = _in_rows(logits), _in_rows(teacher)
    sizes = (logits.stride(0), teacher.stride(0), *logits.shape)
    outputs = (loss, lse, teacher_lse)
    _launch(_distillation_forward_kernel, logits, logits, teacher, *outputs, *sizes, INVERSE=1 / temperature)
    return loss, lse, teacher_lse


def distillation_backward(dloss, logits, lse, teacher, teacher_lse, temperature):
    dlogits = FAKES["distillation_backward"](dloss, logits)
    logits, teacher = _in_rows(logits), _in_rows(teacher)
    tensors = (dloss.contiguous(), logits, lse.contiguous(), teacher, teacher_lse.contiguous(), dlogits)
    sizes = (logits.stride(0), teacher.stride(0), *logits.shape)
    _launch(_distillation_backward_kernel, logits, *tensors, *sizes, INVERSE=1 / temperature)
    return dlogits


IMPLEMENTATIONS = {
    "cross_entropy_forward": cross_entropy_forward,
    "cross_entropy_backward": cross_entropy_backward,
    "cross_entropy_backward_": cross_entropy_backward_,
    "distillation_forward": distillation_forward,
    "distillation_backward": distillation_backward,
}

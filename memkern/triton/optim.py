"""The optimizer ops in Triton: a launch for all tensors of one combination of dtypes, at one alignment."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.ops import is_dense, same_order
from memkern.triton.common import dense, rounded, widened
from memkern.triton.multi_tensor import (
    BLOCK,
    END,
    LISTS,
    TYPES,
    aligned,
    bits,
    given,
    launch,
    number,
    on_device,
    pointer,
    row_of,
    size_of,
    table_of,
    this_chunk,
)
from memkern.triton.optim_formulas import ADAM, AMSGRAD, LAMB, LION, MOMENTUM, SGD, lamb_direction, lamb_scalars

# Places in the table: among what is shared, and in a row.
LR_TENSOR, GRAD_SCALE, CLIP, FOUND_INF, LR, SIGN, NUMBERS = (tl.constexpr(i) for i in range(1, 8))
STEP, RATIO, WEIGHT, GRAD, COPY, STATE = (tl.constexpr(LISTS.value + i) for i in range(6))


# ---- Kernels


@triton.jit
def _load(pointer, i, inside, dtype: tl.constexpr):
    return tl.zeros(i.shape, tl.float32) if dtype is None else widened(tl.load(pointer + i, mask=inside, other=0.0))


@triton.jit
def _store(pointer, i, inside, value, dtype: tl.constexpr):
    if dtype is not None:
        tl.store(pointer + i, rounded(value, dtype), mask=inside)


@triton.jit
def _unscale(table):
    return (1.0 / given(table + GRAD_SCALE, 1.0)).to(tl.float32)


@triton.jit
def _begin(table, SCALARS: tl.constexpr):
    """This program's row and elements, of which a skipped step has none, and the numbers for them."""
    row, first, last = this_chunk(table)
    last = tl.where(given(table + FOUND_INF, 0.0) == 0.0, last, first)
    lr = given(table + LR_TENSOR, number(table + LR)) * given(row + RATIO, 1.0)
    scalars = [x.to(tl.float32) for x in SCALARS(table + NUMBERS, lr, given(row + STEP, 0.0))]
    along = (given(table + CLIP, 1.0) * number(table + SIGN)).to(tl.float32)
    return row, first, last, scalars, _unscale(table), along


@triton.jit
def step_kernel(
    table, SCALARS: tl.constexpr, UPDATE: tl.constexpr, DTYPES: tl.constexpr, WRITE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DTYPES: of weight, gradient, copy and three states; None for what there is not."""
    row, first, last, scalars, unscale, along = _begin(table, SCALARS)
    size = size_of(row, ALIGNED)
    w_ptr, g_ptr = pointer(row + WEIGHT, DTYPES[0], ALIGNED), pointer(row + GRAD, DTYPES[1], ALIGNED)
    copy_ptr, a_ptr = pointer(row + COPY, DTYPES[2], ALIGNED), pointer(row + STATE, DTYPES[3], ALIGNED)
    b_ptr, c_ptr = pointer(row + STATE + 1, DTYPES[4], ALIGNED), pointer(row + STATE + 2, DTYPES[5], ALIGNED)
    for block in range(first, last, BLOCK):
        i = block + tl.arange(0, BLOCK).to(tl.int64)
        inside = i < size
        w, g = _load(w_ptr, i, inside, DTYPES[0]), _load(g_ptr, i, inside, DTYPES[1]) * unscale
        a, b = _load(a_ptr, i, inside, DTYPES[3]), _load(b_ptr, i, inside, DTYPES[4])
        c = _load(c_ptr, i, inside, DTYPES[5])
        w, a, b, c = UPDATE(scalars, w, g * along, a, b, c)
        _store(w_ptr, i, inside, w, DTYPES[0])
        _store(copy_ptr, i, inside, w, DTYPES[2])
        _store(a_ptr, i, inside, a, DTYPES[3])
        _store(b_ptr, i, inside, b, DTYPES[4])
        _store(c_ptr, i, inside, c, DTYPES[5])
        if WRITE:
            _store(g_ptr, i, inside, g, DTYPES[1])


@triton.jit
def lamb_norm_kernel(table, sums, DTYPES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The squares of weight and direction, summed over each chunk."""
    row, first, last, scalars, unscale, along = _begin(table, lamb_scalars)
    size = size_of(row, ALIGNED)
    w_ptr, g_ptr = pointer(row + WEIGHT, DTYPES[0], ALIGNED), pointer(row + GRAD, DTYPES[1], ALIGNED)
    m_ptr, v_ptr = pointer(row + STATE, DTYPES[3], ALIGNED), pointer(row + STATE + 1, DTYPES[4], ALIGNED)
    weights, directions = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for block in range(first, last, BLOCK):
        i = block + tl.arange(0, BLOCK).to(tl.int64)
        inside = i < size
        w, g = _load(w_ptr, i, inside, DTYPES[0]), _load(g_ptr, i, inside, DTYPES[1]) * unscale * along
        m, v = _load(m_ptr, i, inside, DTYPES[3]), _load(v_ptr, i, inside, DTYPES[4])
        u, _, _ = lamb_direction(scalars, w, g, m, v)
        weights += w * w
        directions += tl.where(inside, u * u, 0.0)
    tl.store(sums + 2 * tl.program_id(0), tl.sum(weights.to(tl.float64), 0))
    tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(directions.to(tl.float64), 0))


@triton.jit
def _sum_of(sums, first, last, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(first, last, BLOCK):
        i = block + tl.arange(0, BLOCK).to(tl.int64)
        total += tl.load(sums + STRIDE * i, mask=i < last, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def lamb_ratio_kernel(table, sums, ratios, BLOCK: tl.constexpr):
    """A program a row."""
    row, first = row_of(table, tl.program_id(0).to(tl.int64))
    last = tl.load(row + END)
    weight, direction = _sum_of(sums, first, last, 2, BLOCK), _sum_of(sums + 1, first, last, 2, BLOCK)
    usable = (weight > 0) & (direction > 0)
    ratio = tl.sqrt(tl.where(usable, weight, 1.0) / tl.where(usable, direction, 1.0))
    tl.store(ratios + tl.program_id(0), ratio.to(tl.float32))


@triton.jit
def square_sum_kernel(table, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    row, first, last = this_chunk(table)
    size, unscale, g_ptr = size_of(row, ALIGNED), _unscale(table), pointer(row + LISTS, DTYPE, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(first, last, BLOCK):
        i = block + tl.arange(0, BLOCK).to(tl.int64)
        g = _load(g_ptr, i, i < size, DTYPE) * unscale
        # NaN, which a sum of squares otherwise never is, says that a value is not finite.
        total += tl.where(tl.abs(g) < float("inf"), g * g, float("nan"))
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.float64), 0))


@triton.jit
def finish_check_kernel(table, sums, count, result, BLOCK: tl.constexpr):
    square, unscale = _sum_of(sums, 0, count, 1, BLOCK), _unscale(table)
    norm = tl.sqrt(square).to(tl.float32)
    good = (square == square) & (tl.abs(unscale) < float("inf")) & (unscale != 0.0)
    clip = number(table + NUMBERS) / (norm.to(tl.float64) + 1e-6)
    tl.store(result, tl.where(good, 0.0, 1.0))
    tl.store(result + 1, norm)
    tl.store(result + 2, tl.where(clip < 1.0, clip, 1.0).to(tl.float32))


@triton.jit
def advance_kernel(table, count, BLOCK: tl.constexpr):
    """table: the addresses of found_inf, of the number of skipped steps, and of the counters."""
    found = given(table, 0.0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(table + 2 + i, mask=i < count, other=0).to(tl.pointer_type(tl.float32))
    counted = i < tl.where(found == 0.0, count, 0)
    tl.store(steps, tl.load(steps, mask=counted, other=0.0) + 1.0, mask=counted)
    skipped = pointer(table + 1, tl.int64)
    counted = (tl.program_id(0) == 0) & (tl.load(table + 1) != 0) & (found != 0.0)
    tl.store(skipped, tl.load(skipped, mask=counted, other=0) + 1, mask=counted)


# ---- Ops


def _address(name: str, x: Tensor | None, like: Tensor) -> int:
    """The address of a tensor that lies in memory as ``like`` does; 0 for None."""
    if x is None:
        return 0
    if x.shape != like.shape or x.device != like.device or not same_order(x, like):
        raise ValueError(f"{name}: needs the shape, strides and device of its parameter")
    if x.dtype not in TYPES:
        raise ValueError(f"{name}: got {x.dtype}, needs float16, bfloat16, float32 or float64")
    return x.data_ptr()


def _scalar(name: str, x: Tensor | None, like: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of one number; 0 for None."""
    if x is None:
        return 0
    if x.dtype != dtype or x.numel() != 1 or x.device != like.device:
        raise ValueError(f"{name}: got {x.numel()} of {x.dtype} on {x.device}, needs one {dtype} on {like.device}")
    return x.data_ptr()


def _shared(
    like: Tensor, lr_tensor: Tensor | None, grad_scale: Tensor | None, clip: Tensor | None, found_inf: Tensor | None,
    lr: float, maximize: bool, *numbers: float,
) -> list[int]:  # fmt: skip
    """The entries of the table that its tensors share, in the order of their places."""
    scalars = {"lr_tensor": lr_tensor, "grad_scale": grad_scale, "clip": clip, "found_inf": found_inf}
    addresses = [_scalar(name, x, like) for name, x in scalars.items()]
    return addresses + [bits(x) for x in (lr, -1.0 if maximize else 1.0, *numbers)]


def check_and_norm(grads: list[Tensor], grad_scale: Tensor | None, max_norm: float) -> Tensor:
    like = grads[0]
    groups = defaultdict(list)
    kept = [dense(grad) for grad in grads if grad.numel() > 0]
    for grad in kept:
        if grad.device != like.device:
            raise ValueError(f"grads: got one on {grad.device}, needs all on {like.device}")
        row = grad.numel(), [_address("grads", grad, grad)]
        groups[grad.dtype, aligned(*row)].append(row)
    shared = _shared(like, None, grad_scale, None, None, 0.0, False, max_norm)
    launches = [(kind, *table_of(like, shared, rows)) for kind, rows in groups.items()]
    sums = torch.empty(sum(chunks for _, _, chunks in launches), dtype=torch.float64, device=like.device)
    first = 0
    for (dtype, is_aligned), table, chunks in launches:
        launch(
            square_sum_kernel, (chunks,), like, table, sums[first:], DTYPE=TYPES[dtype], ALIGNED=is_aligned, BLOCK=BLOCK
        )
        first += chunks
    result = torch.empty(3, dtype=torch.float32, device=like.device)
    table, _ = table_of(like, shared, [])
    launch(finish_check_kernel, (1,), like, table, sums, first, result, BLOCK=BLOCK)
    return result


def advance(steps: list[Tensor], skipped: Tensor | None, found_inf: Tensor | None) -> None:
    if not steps and skipped is None:
        return
    like = steps[0] if steps else skipped
    counters = [_scalar(f"steps[{i}]", step, like) for i, step in enumerate(steps)]
    skips = _scalar("skipped", skipped, like, torch.int64)
    table = on_device(like, [_scalar("found_inf", found_inf, like), skips, *counters])
    blocks = triton.cdiv(max(1, len(counters)), BLOCK)
    launch(advance_kernel, (blocks,), like, table, len(counters), BLOCK=BLOCK)


def _step(
    algorithm: tuple[Any, Any], params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]],
    masters: list[Tensor], steps: list[Tensor], shared: list[int], write_grads: bool,
) -> None:  # fmt: skip
    """Run the algorithm's two functions over all tensors; LAMB's, after a pass for its norms."""
    given_lists = [("grads", grads), *(("states", state) for state in states)]
    given_lists += [("masters", masters)] if masters else []
    given_lists += [("steps", steps)] if steps or algorithm not in (SGD, LION) else []
    for name, tensors in given_lists:
        if len(tensors) != len(params):
            raise ValueError(f"{name}: got {len(tensors)} tensors, needs one for each of {len(params)} params")
    like = params[0]
    groups = defaultdict(list)
    for k, param in enumerate(params):
        if param.numel() == 0:
            continue
        if param.device != like.device or not is_dense(param):
            raise ValueError(f"params[{k}]: needs elements that fill one stretch of memory on {like.device}")
        weight, copy = (masters[k], param) if masters else (param, None)
        lists = [weight, grads[k], copy, *(state[k] for state in states), *[None] * (3 - len(states))]
        names = ("masters", "grads", "params", *["states"] * 3)
        addresses = [_address(name, x, param) for name, x in zip(names, lists, strict=True)]
        dtypes = tuple(None if x is None else TYPES[x.dtype] for x in lists)
        step = _scalar("steps", steps[k], like) if steps else 0
        groups[dtypes, aligned(param.numel(), addresses)].append((param.numel(), [step, 0, *addresses]))
    scalars, update = algorithm
    for (dtypes, is_aligned), rows in groups.items():
        meta = {"DTYPES": dtypes, "ALIGNED": is_aligned, "BLOCK": BLOCK}
        if algorithm is LAMB:
            ratios = torch.ones(len(rows), dtype=torch.float32, device=like.device)
            for k, (_, addresses) in enumerate(rows):
                addresses[RATIO.value - LISTS.value] = ratios.data_ptr() + 4 * k
        table, chunks = table_of(like, shared, rows)
        if algorithm is LAMB:
            sums = torch.empty(2 * chunks, dtype=torch.float64, device=like.device)
            launch(lamb_norm_kernel, (chunks,), like, table, sums, **meta)
            launch(lamb_ratio_kernel, (len(rows),), like, table, sums, ratios, BLOCK=BLOCK)
        write = write_grads and shared[GRAD_SCALE.value - 1] != 0
        launch(step_kernel, (chunks,), like, table, SCALARS=scalars, UPDATE=update, WRITE=write, **meta)


def adamw_step(
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize, write_grads,
):  # fmt: skip
    algorithm, maxima = (AMSGRAD, [max_exp_avg_sqs]) if max_exp_avg_sqs else (ADAM, [])
    numbers = beta1, beta2, eps, weight_decay, decoupled
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize, *numbers)
    _step(algorithm, params, grads, [exp_avgs, exp_avg_sqs, *maxima], masters, steps, shared, write_grads)


def sgd_step(
    params, grads, momentum_buffers, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, momentum, dampening, weight_decay, nesterov, maximize, write_grads,
):  # fmt: skip
    algorithm, buffers = (MOMENTUM, [momentum_buffers]) if momentum_buffers else (SGD, [])
    numbers = momentum, dampening, weight_decay, nesterov
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize, *numbers)
    _step(algorithm, params, grads, buffers, masters, steps, shared, write_grads)


def lamb_step(
    params, grads, exp_avgs, exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, maximize, write_grads,
):  # fmt: skip
    numbers = beta1, beta2, eps, weight_decay
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize, *numbers)
    _step(LAMB, params, grads, [exp_avgs, exp_avg_sqs], masters, steps, shared, write_grads)


def lion_step(
    params, grads, exp_avgs, masters, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, weight_decay, maximize, write_grads,
):  # fmt: skip
    numbers = beta1, beta2, weight_decay
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize, *numbers)
    _step(LION, params, grads, [exp_avgs], masters, [], shared, write_grads)


IMPLEMENTATIONS = {
    "check_and_norm": check_and_norm,
    "advance": advance,
    "adamw_step": adamw_step,
    "sgd_step": sgd_step,
    "lamb_step": lamb_step,
    "lion_step": lion_step,
}

"""The optimizer steps in Triton, a launch a tensor. PyTorch puts their single numbers together, on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memkern.reference.common import wide
from memkern.reference.optim import advance
from memkern.triton.common import dense, launch, rounded, widened

BLOCK = 1024
CHUNK = tl.constexpr(8 * BLOCK)

# Places in the tensor of numbers that all tensors of a call share.
UNSCALE, ALONG, LR, SKIP = (tl.constexpr(i) for i in range(4))


@triton.jit
def square_sum_kernel(x_ptr, sums_ptr, first, shared_ptr, n, BLOCK: tl.constexpr):
    unscale = tl.load(shared_ptr + UNSCALE)
    start = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK, BLOCK):
        i = start + block
        x = widened(tl.load(x_ptr + i, mask=i < n, other=0.0)) * unscale
        # NaN, which a sum of squares otherwise never is, says that a value is not finite.
        total += tl.where(tl.abs(x) < float("inf"), x * x, float("nan"))
    tl.store(sums_ptr + first + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _gradient(g_ptr, i, inside, shared_ptr, WRITE: tl.constexpr):
    """The gradient to descend along; unscaled, it is written back where asked."""
    g = widened(tl.load(g_ptr + i, mask=inside, other=0.0)) * tl.load(shared_ptr + UNSCALE)
    if WRITE:
        tl.store(g_ptr + i, rounded(g, g_ptr.dtype.element_ty), mask=inside)
    return g * tl.load(shared_ptr + ALONG)


@triton.jit
def _store_parameter(w_ptr, copy_ptr, i, inside, w, COPY: tl.constexpr):
    tl.store(w_ptr + i, rounded(w, w_ptr.dtype.element_ty), mask=inside)
    if COPY:
        tl.store(copy_ptr + i, rounded(w, copy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _elements(n, shared_ptr, BLOCK: tl.constexpr):
    """This program's elements, and which of them there are: none in a skipped step."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return i, i < tl.where(tl.load(shared_ptr + SKIP) == 0.0, n, 0)


@triton.jit
def _moments(m_ptr, v_ptr, i, inside, g, m_rate, v_keep, v_rate):
    m = widened(tl.load(m_ptr + i, mask=inside, other=0.0))
    v = widened(tl.load(v_ptr + i, mask=inside, other=0.0))
    m = m + m_rate * (g - m)
    v = v_keep * v + v_rate * g * g
    tl.store(m_ptr + i, rounded(m, m_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + i, rounded(v, v_ptr.dtype.element_ty), mask=inside)
    return m, v


@triton.jit
def adam_kernel(
    w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, top_ptr, shared_ptr, corrections_ptr, n, m_rate, v_keep, v_rate, eps, decay,
    l2, COPY: tl.constexpr, WRITE: tl.constexpr, AMSGRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, inside = _elements(n, shared_ptr, BLOCK)
    w = widened(tl.load(w_ptr + i, mask=inside, other=0.0))
    g = _gradient(g_ptr, i, inside, shared_ptr, WRITE)
    g = tl.where(l2 != 0.0, g + l2 * w, g)
    m, v = _moments(m_ptr, v_ptr, i, inside, g, m_rate, v_keep, v_rate)
    if AMSGRAD:
        top = widened(tl.load(top_ptr + i, mask=inside, other=0.0))
        v = tl.where(top > v, top, v)
        tl.store(top_ptr + i, rounded(v, top_ptr.dtype.element_ty), mask=inside)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(corrections_ptr + 1)) + eps
    w = w * (1.0 - tl.load(shared_ptr + LR) * decay) - tl.div_rn(tl.load(corrections_ptr) * m, denominator)
    _store_parameter(w_ptr, copy_ptr, i, inside, w, COPY)


@triton.jit
def sgd_kernel(
    w_ptr, copy_ptr, g_ptr, b_ptr, step_ptr, shared_ptr, n, momentum, rate, decay,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, COPY: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, inside = _elements(n, shared_ptr, BLOCK)
    w = widened(tl.load(w_ptr + i, mask=inside, other=0.0))
    g = _gradient(g_ptr, i, inside, shared_ptr, WRITE)
    g = tl.where(decay != 0.0, g + decay * w, g)
    if MOMENTUM:
        b = widened(tl.load(b_ptr + i, mask=inside, other=0.0))
        b = tl.where(tl.load(step_ptr) == 1.0, g, momentum * b + rate * g)
        tl.store(b_ptr + i, rounded(b, b_ptr.dtype.element_ty), mask=inside)
        g = g + momentum * b if NESTEROV else b
    _store_parameter(w_ptr, copy_ptr, i, inside, w - tl.load(shared_ptr + LR) * g, COPY)


@triton.jit
def lamb_direction_kernel(
    w_ptr, u_ptr, g_ptr, m_ptr, v_ptr, shared_ptr, corrections_ptr, n, m_rate, v_keep, v_rate, eps, decay,
    WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, inside = _elements(n, shared_ptr, BLOCK)
    w = widened(tl.load(w_ptr + i, mask=inside, other=0.0))
    g = _gradient(g_ptr, i, inside, shared_ptr, WRITE)
    m, v = _moments(m_ptr, v_ptr, i, inside, g, m_rate, v_keep, v_rate)
    denominator = tl.div_rn(tl.sqrt_rn(v), tl.load(corrections_ptr + 1)) + eps
    u = tl.div_rn(tl.load(corrections_ptr) * m, denominator) + decay * w
    tl.store(u_ptr + i, u, mask=inside)


@triton.jit
def lamb_kernel(w_ptr, copy_ptr, u_ptr, trust_ptr, shared_ptr, n, COPY: tl.constexpr, BLOCK: tl.constexpr):
    i, inside = _elements(n, shared_ptr, BLOCK)
    w = widened(tl.load(w_ptr + i, mask=inside, other=0.0))
    u = tl.load(u_ptr + i, mask=inside, other=0.0)
    w = w - tl.load(shared_ptr + LR) * tl.load(trust_ptr) * u
    _store_parameter(w_ptr, copy_ptr, i, inside, w, COPY)


@triton.jit
def lion_kernel(
    w_ptr, copy_ptr, g_ptr, m_ptr, shared_ptr, n, look, rate, decay,
    COPY: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, inside = _elements(n, shared_ptr, BLOCK)
    w = widened(tl.load(w_ptr + i, mask=inside, other=0.0))
    m = widened(tl.load(m_ptr + i, mask=inside, other=0.0))
    g = _gradient(g_ptr, i, inside, shared_ptr, WRITE)
    lr = tl.load(shared_ptr + LR)
    direction = m + look * (g - m)
    w = w * (1.0 - lr * decay) - tl.where(direction > 0, lr, tl.where(direction < 0, -lr, 0.0))
    tl.store(m_ptr + i, rounded(m + rate * (g - m), m_ptr.dtype.element_ty), mask=inside)
    _store_parameter(w_ptr, copy_ptr, i, inside, w, COPY)


def _shared(like: Tensor, lr_tensor=None, grad_scale=None, clip=None, found_inf=None, lr=0.0, maximize=False) -> Tensor:
    """The numbers that all tensors of a call share, in the places named above."""
    one = torch.ones((), dtype=torch.float32, device=like.device)
    unscale = one if grad_scale is None else wide(grad_scale).reciprocal().float()
    along = (one if clip is None else clip) * (-1 if maximize else 1)
    skip = one * 0 if found_inf is None else (found_inf != 0).float()
    return torch.stack([unscale.reshape(()), along.reshape(()), one * lr if lr_tensor is None else lr_tensor, skip])


def _corrections(steps: list[Tensor], lr: float | Tensor, beta1: float, beta2: float) -> Tensor:
    """lr / (1 - beta1^t) and sqrt(1 - beta2^t), a row for each of the steps t."""
    t = wide(torch.stack(steps))
    return torch.stack([lr / (1 - beta1**t), (1 - beta2**t).sqrt()], -1).float()


def _blocks(x: Tensor) -> tuple[int, ...]:
    return (triton.cdiv(x.numel(), BLOCK),)


def check_and_norm(grads: list[Tensor], grad_scale: Tensor | None, max_norm: float) -> Tensor:
    shared = _shared(grads[0], grad_scale=grad_scale)
    chunks = [triton.cdiv(grad.numel(), CHUNK.value) for grad in grads]
    sums = torch.zeros(sum(chunks) + 1, dtype=torch.float32, device=grads[0].device)
    first = 0
    for grad, count in zip(grads, chunks, strict=True):
        if count > 0:
            launch(square_sum_kernel, (count,), grad, dense(grad), sums, first, shared, grad.numel(), BLOCK=BLOCK)
        first += count
    square = wide(sums).sum()
    unscale = shared[UNSCALE.value]
    found = square.isnan() | ~unscale.isfinite() | (unscale == 0)
    norm = square.sqrt().float()
    clip = max_norm / (norm + 1e-6)
    return torch.stack([found.float(), norm, torch.where(clip < 1, clip, 1.0)])


def _weights(params: list[Tensor], masters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What is updated, and what gets a rounded copy: the parameter, where that is not what is updated itself."""
    return list(zip(masters or params, params, strict=True))


def adamw_step(
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize, write_grads,
):  # fmt: skip
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize)
    corrections = _corrections(steps, lr if lr_tensor is None else lr_tensor, beta1, beta2)
    decay, l2 = (weight_decay, 0.0) if decoupled else (0.0, weight_decay)
    for k, (w, copy) in enumerate(_weights(params, masters)):
        if w.numel() > 0:
            launch(
                adam_kernel, _blocks(w), w, w, copy, grads[k], exp_avgs[k], exp_avg_sqs[k],
                max_exp_avg_sqs[k] if max_exp_avg_sqs else w, shared, corrections[k], w.numel(), 1 - beta1, beta2,
                1 - beta2, eps, decay, l2, COPY=len(masters) > 0, WRITE=write_grads and grad_scale is not None,
                AMSGRAD=len(max_exp_avg_sqs) > 0, BLOCK=BLOCK,
            )  # fmt: skip


def sgd_step(
    params, grads, momentum_buffers, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, momentum, dampening, weight_decay, nesterov, maximize, write_grads,
):  # fmt: skip
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize)
    for k, (w, copy) in enumerate(_weights(params, masters)):
        if w.numel() > 0:
            launch(
                sgd_kernel, _blocks(w), w, w, copy, grads[k], momentum_buffers[k] if momentum_buffers else w,
                steps[k] if steps else shared, shared, w.numel(), momentum, 1 - dampening, weight_decay,
                MOMENTUM=len(momentum_buffers) > 0, NESTEROV=nesterov, COPY=len(masters) > 0,
                WRITE=write_grads and grad_scale is not None, BLOCK=BLOCK,
            )  # fmt: skip


def lamb_step(
    params, grads, exp_avgs, exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, maximize, write_grads,
):  # fmt: skip
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize)
    corrections = _corrections(steps, 1.0, beta1, beta2)
    for k, (w, copy) in enumerate(_weights(params, masters)):
        if w.numel() == 0:
            continue
        u = torch.zeros_like(w, dtype=torch.float32)
        launch(
            lamb_direction_kernel, _blocks(w), w, w, u, grads[k], exp_avgs[k], exp_avg_sqs[k], shared, corrections[k],
            w.numel(), 1 - beta1, beta2, 1 - beta2, eps, weight_decay, WRITE=write_grads and grad_scale is not None,
            BLOCK=BLOCK,
        )  # fmt: skip
        size, length = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (w, u))
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        launch(lamb_kernel, _blocks(w), w, w, copy, u, trust, shared, w.numel(), COPY=len(masters) > 0, BLOCK=BLOCK)


def lion_step(
    params, grads, exp_avgs, masters, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, weight_decay, maximize, write_grads,
):  # fmt: skip
    shared = _shared(params[0], lr_tensor, grad_scale, clip, found_inf, lr, maximize)
    for k, (w, copy) in enumerate(_weights(params, masters)):
        if w.numel() > 0:
            launch(
                lion_kernel, _blocks(w), w, w, copy, grads[k], exp_avgs[k], shared, w.numel(), 1 - beta1, 1 - beta2,
                weight_decay, COPY=len(masters) > 0, WRITE=write_grads and grad_scale is not None, BLOCK=BLOCK,
            )  # fmt: skip


IMPLEMENTATIONS = {
    "check_and_norm": check_and_norm,
    "advance": advance,
    "adamw_step": adamw_step,
    "sgd_step": sgd_step,
    "lamb_step": lamb_step,
    "lion_step": lion_step,
}

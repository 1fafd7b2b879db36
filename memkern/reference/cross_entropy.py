"""Cross-entropy and distillation in plain PyTorch. ``losses`` and ``divergences`` are differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from memkern.ops import computed_in
from memkern.reference.common import wide

# Of a row with logits s_c (capped), lse = log sum_c exp(s_c), p_c = exp(s_c - lse), targets q_c (1 at the class
# and 0 elsewhere, or probabilities), smoothed q'_c = (1 - smoothing) q_c + smoothing / classes (Szegedy et al. 2015,
# arXiv:1512.00567) and class weights w_c, let a_c = w_c q'_c. With z the factor of the z-loss (Chowdhery et al.
# 2022, arXiv:2204.02311),
#   loss = sum_c a_c (lse - s_c) + z lse^2,    dlse/ds_c = p_c,
#   dloss/ds_c = p_c (sum_c a_c + 2 z lse) - a_c,
# and under the cap (Gemma 2, arXiv:2408.00118)
#   s_c = softcap tanh(logit_c / softcap),  ds_c/dlogit_c = 1 / cosh^2(logit_c / softcap).


def _log_sum_exp(s: Tensor) -> Tensor:
    """NaN for a row with NaN or +inf in it, and for one of -inf alone."""
    lse = torch.logsumexp(s, -1)
    return torch.where(lse.isfinite(), lse, torch.nan)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(wide(logits) / softcap) if softcap else wide(logits)


def _coefficients(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """a_c, NaN where the target is out of range, and which rows are not ignored."""
    classes = logits.shape[-1]
    if target.is_floating_point():
        q, counted = wide(target), torch.ones(target.shape[:-1], dtype=torch.bool, device=target.device)
    else:
        counted = target != ignore_index
        q = wide(target[..., None] == torch.arange(classes, device=target.device))
        q = torch.where((counted & ((target < 0) | (target >= classes)))[..., None], torch.nan, q)
    q = (1 - label_smoothing) * q + label_smoothing / max(classes, 1)
    return q if weight is None else q * wide(weight), counted


def losses(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss and log-sum-exp of each row, wide."""
    s = _capped(logits, softcap)
    a, counted = _coefficients(logits, target, weight, ignore_index, label_smoothing)
    lse = _log_sum_exp(s)
    gap = -torch.log_softmax(s, -1)  # lse - s, without their magnitude
    loss = (a * torch.where((a == 0) & gap.isinf(), 0, gap)).sum(-1)  # a class of no weight adds nothing
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(counted, loss, 0), lse


def divergences(logits: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """sum_c t_c (log t_c - log p_c) of each row, and both log-sum-exps, wide.

    t and p are the softmax of teacher / temperature and of logits / temperature (Hinton et al. 2015, arXiv:1503.02531).
    With u_c = log t_c - log p_c, that is sum_c t_c (exp(-u_c) - 1 + u_c), of which no term is below 0, as p sums to 1.
    """
    s, t = wide(logits) / temperature, wide(teacher) / temperature
    lse, teacher_lse = _log_sum_exp(s), _log_sum_exp(t)
    log_p, log_t = torch.log_softmax(s, -1), torch.log_softmax(t, -1)
    probability, gap = torch.exp(log_t), log_t - log_p
    gap = torch.where((probability == 0) & ~gap.isfinite(), 0, gap)
    small = gap.abs() < 1  # elsewhere exp(-u) may be infinite
    u = torch.where(small, gap, 0)
    loss = torch.where(
        small & (probability > 0), probability * (torch.expm1(-u) + u), (log_p.exp() - probability) + probability * gap
    )
    return loss.sum(-1), lse, teacher_lse


def _check(logits: Tensor, target: Tensor, ignore_index: int) -> None:
    """A target out of range is found on the CPU only: elsewhere its row is NaN, and nothing waits for the device."""
    rows, classes = logits.shape
    if target.shape != ((rows, classes) if target.is_floating_point() else (rows,)):
        raise ValueError(f"target: got shape {tuple(target.shape)}, needs {(rows,)}, or {(rows, classes)} if floating")
    if target.is_floating_point() or target.device.type != "cpu":
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"target: got {int(target[row])} at row {row}, needs 0 to {classes - 1}, or {ignore_index}")


def cross_entropy_forward(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap):
    _check(logits, target, ignore_index)
    dtype = computed_in(logits)
    loss, lse = losses(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap)
    return loss.to(dtype), lse.to(dtype)


def cross_entropy_backward(dloss, logits, lse, target, weight, ignore_index, label_smoothing, z_loss, softcap):
    _check(logits, target, ignore_index)
    lse = wide(lse)[:, None]
    p = torch.exp(_capped(logits, softcap) - lse)
    a, counted = _coefficients(logits, target, weight, ignore_index, label_smoothing)
    gradient = p * (a.sum(-1, keepdim=True) + 2 * z_loss * lse) - a
    if softcap:
        gradient = gradient * torch.cosh(wide(logits) / softcap) ** -2
    return torch.where(counted[:, None], wide(dloss)[:, None] * gradient, 0).to(logits.dtype).contiguous()


def cross_entropy_backward_(dloss, logits, *arguments):
    logits.copy_(cross_entropy_backward(dloss, logits, *arguments))


def distillation_forward(logits, teacher, temperature):
    dtype = computed_in(logits)
    loss, lse, teacher_lse = divergences(logits, teacher, temperature)
    return loss.clamp(min=0).to(dtype), lse.to(dtype), teacher_lse.to(dtype)


def distillation_backward(dloss, logits, lse, teacher, teacher_lse, temperature):
    p = torch.exp(wide(logits) / temperature - wide(lse)[:, None])
    probability = torch.exp(wide(teacher) / temperature - wide(teacher_lse)[:, None])
    return (wide(dloss)[:, None] / temperature * (p - probability)).to(logits.dtype).contiguous()


IMPLEMENTATIONS = {
    "cross_entropy_forward": cross_entropy_forward,
    "cross_entropy_backward": cross_entropy_backward,
    "cross_entropy_backward_": cross_entropy_backward_,
    "distillation_forward": distillation_forward,
    "distillation_backward": distillation_backward,
}

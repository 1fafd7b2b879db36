"""The optimizer steps in plain PyTorch, tensor by tensor, without a value read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memkern.reference.common import wide


def check_and_norm(grads: list[Tensor], grad_scale: Tensor | None, max_norm: float) -> Tensor:
    inverse = torch.ones((), device=grads[0].device) if grad_scale is None else _inverse(grad_scale)
    unscaled = [wide(grad) * inverse for grad in grads]
    # In the dtype that the kernels compute in: a value past its range is an infinity there.
    kernel_dtypes = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
    finite = torch.stack([g.to(dtype).isfinite().all() for g, dtype in zip(unscaled, kernel_dtypes, strict=True)]).all()
    finite = finite & inverse.isfinite() & (inverse != 0)
    norm = torch.stack([g.square().sum() for g in unscaled]).sum().sqrt().float()
    clip = max_norm / (norm + 1e-6)
    return torch.stack([(~finite).float(), norm, torch.where(clip < 1, clip, 1.0)])


def advance(steps: list[Tensor], skipped: Tensor | None, found_inf: Tensor | None) -> None:
    counters = [(f"steps[{i}]", step, torch.float32) for i, step in enumerate(steps)]
    counters += [] if skipped is None else [("skipped", skipped, torch.int64)]
    for name, x, dtype in counters:
        if x.dtype != dtype or x.numel() != 1 or x.device != counters[0][1].device:
            raise ValueError(f"{name}: got {x.numel()} of {x.dtype} on {x.device}, needs one {dtype} on one device")
    for step in steps:
        step.add_(1 if found_inf is None else found_inf == 0)
    if skipped is not None and found_inf is not None:
        skipped.add_(found_inf != 0)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale as the kernels have it: an fp32 number."""
    return wide(wide(scale).reciprocal().float())


@dataclass(frozen=True)
class _Step:
    """What the steps share: the numbers read on the device, and how results are stored."""

    lr: float | Tensor
    grad_scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None
    maximize: bool
    write_grads: bool

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient to descend along, and the unscaled one written back where asked."""
        g = wide(grad)
        if self.grad_scale is not None:
            g = g * _inverse(self.grad_scale)
            if self.write_grads:
                self.store(grad, g)
        if self.clip is not None:
            g = g * self.clip
        return -g if self.maximize else g

    def store(self, target: Tensor, value: Tensor) -> None:
        value = value.to(target.dtype)
        target.copy_(value if self.found_inf is None else torch.where(self.found_inf == 0, value, target))

    def store_parameter(self, param: Tensor, master: Tensor | None, value: Tensor) -> None:
        if master is not None:
            self.store(master, value)
            value = value.to(master.dtype)
        self.store(param, value)


def _step(lr_tensor: Tensor | None, lr: float, *rest) -> _Step:
    return _Step(lr if lr_tensor is None else wide(lr_tensor), *rest)


def _or_none(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor | None]:
    return list(tensors) or [None] * len(like)


def adamw_step(
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize, write_grads,
):  # fmt: skip
    shared = _step(lr_tensor, lr, grad_scale, clip, found_inf, maximize, write_grads)
    maxima, masters = _or_none(max_exp_avg_sqs, params), _or_none(masters, params)
    for p, grad, m, v, top, master, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, maxima, masters, steps, strict=True
    ):
        g, w = shared.gradient(grad), wide(p if master is None else master)
        if decoupled:
            w = w * (1 - shared.lr * weight_decay)
        else:
            g = g + weight_decay * w
        new_m = wide(m) + (1 - beta1) * (g - wide(m))
        new_v = beta2 * wide(v) + (1 - beta2) * g * g
        shared.store(m, new_m)
        shared.store(v, new_v)
        if top is not None:
            new_v = torch.maximum(wide(top), new_v)
            shared.store(top, new_v)
        t = wide(step)
        denominator = (new_v / (1 - beta2**t)).sqrt() + eps
        shared.store_parameter(p, master, w - shared.lr / (1 - beta1**t) * new_m / denominator)


def sgd_step(
    params, grads, momentum_buffers, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, momentum, dampening, weight_decay, nesterov, maximize, write_grads,
):  # fmt: skip
    shared = _step(lr_tensor, lr, grad_scale, clip, found_inf, maximize, write_grads)
    buffers, steps, masters = (_or_none(some, params) for some in (momentum_buffers, steps, masters))
    for p, grad, buffer, master, step in zip(params, grads, buffers, masters, steps, strict=True):
        g, w = shared.gradient(grad), wide(p if master is None else master)
        g = g + weight_decay * w
        if buffer is not None:
            b = torch.where(step == 1, g, momentum * wide(buffer) + (1 - dampening) * g)
            shared.store(buffer, b)
            g = g + momentum * b if nesterov else b
        shared.store_parameter(p, master, w - shared.lr * g)


def lamb_step(
    params, grads, exp_avgs, exp_avg_sqs, masters, steps, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, eps, weight_decay, maximize, write_grads,
):  # fmt: skip
    shared = _step(lr_tensor, lr, grad_scale, clip, found_inf, maximize, write_grads)
    masters = _or_none(masters, params)
    for p, grad, m, v, master, step in zip(params, grads, exp_avgs, exp_avg_sqs, masters, steps, strict=True):
        g, w, t = shared.gradient(grad), wide(p if master is None else master), wide(step)
        new_m = wide(m) + (1 - beta1) * (g - wide(m))
        new_v = beta2 * wide(v) + (1 - beta2) * g * g
        shared.store(m, new_m)
        shared.store(v, new_v)
        update = new_m / (1 - beta1**t) / ((new_v / (1 - beta2**t)).sqrt() + eps) + weight_decay * w
        size, length = w.norm(), update.norm()
        trust = torch.where((size > 0) & (length > 0), size / length, 1.0)
        shared.store_parameter(p, master, w - shared.lr * trust * update)


def lion_step(
    params, grads, exp_avgs, masters, lr_tensor, grad_scale, clip, found_inf,
    lr, beta1, beta2, weight_decay, maximize, write_grads,
):  # fmt: skip
    shared = _step(lr_tensor, lr, grad_scale, clip, found_inf, maximize, write_grads)
    for p, grad, m, master in zip(params, grads, exp_avgs, _or_none(masters, params), strict=True):
        g, w = shared.gradient(grad), wide(p if master is None else master)
        direction = torch.sign(wide(m) + (1 - beta1) * (g - wide(m)))
        shared.store(m, wide(m) + (1 - beta2) * (g - wide(m)))
        shared.store_parameter(p, master, w * (1 - shared.lr * weight_decay) - shared.lr * direction)


IMPLEMENTATIONS = {
    "check_and_norm": check_and_norm,
    "advance": advance,
    "adamw_step": adamw_step,
    "sgd_step": sgd_step,
    "lamb_step": lamb_step,
    "lion_step": lion_step,
}

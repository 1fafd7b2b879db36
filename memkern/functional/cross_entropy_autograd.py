"""The autograd Functions of losses that are a number a row of logits: cross-entropy and distillation.

The gradients of probabilities, class weights and teachers, and every second derivative, are those of the plain
formulas of the reference: right, not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memkern import ops
from memkern.functional.common import batched, batched_together, forward_derivative, gradients_of, signature_read_once
from memkern.reference import cross_entropy as reference

Maybe = Tensor | None


@dataclass(frozen=True)
class CrossEntropy:
    """What a cross-entropy computes, and on what. The names are those of the ops."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none
    backend: str

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.ignore_index, self.label_smoothing, self.z_loss, self.softcap

    def _op(self, direction: str) -> Any:
        return ops.op(self.backend, f"cross_entropy_{direction}")

    def forward(self, logits: Tensor, target: Tensor, weight: Maybe) -> tuple[Tensor, ...]:
        """The losses, and what backward needs beside the arguments: lse."""
        return self._op("forward")(logits, target, weight, *self._options)

    def plain(self, logits: Tensor, target: Tensor, weight: Maybe) -> tuple[Tensor, ...]:
        """As forward; differentiable."""
        dtype = ops.computed_in(logits)
        return tuple(t.to(dtype) for t in reference.losses(logits, target, weight, *self._options))

    def backward(
        self, dloss: Tensor, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor, _: Maybe = None
    ) -> Tensor:
        return self._op("backward")(dloss, logits, lse, target, weight, *self._options)

    def backward_(self, dloss: Tensor, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor) -> None:
        """The gradient, over the logits."""
        self._op("backward_")(dloss, logits, lse, target, weight, *self._options)

    def bound(self, target: Tensor, weight: Maybe, lse: Tensor) -> Tensor:
        """What no ``|dloss / dlogit|`` of each row exceeds: max(a, p (W + 2 z lse)) with a <= W; see the reference."""
        weighted = weight is not None and weight.shape[0] > 0
        bound = weight.abs().amax().expand_as(lse) if weighted else torch.ones_like(lse)
        if target.is_floating_point():
            bound = bound * target.sum(1, dtype=lse.dtype).clamp(min=1)
        return bound + 2 * self.z_loss * lse.abs() if self.z_loss else bound


@dataclass(frozen=True)
class Distillation:
    """The same of a divergence from a teacher, who takes the target's place; there is no weight."""

    temperature: float
    backend: str

    def forward(self, logits: Tensor, teacher: Tensor, weight: Maybe) -> tuple[Tensor, ...]:
        return ops.op(self.backend, "distillation_forward")(logits, teacher, self.temperature)

    def plain(self, logits: Tensor, teacher: Tensor, weight: Maybe) -> tuple[Tensor, ...]:
        dtype = ops.computed_in(logits)
        return tuple(t.to(dtype) for t in reference.divergences(logits, teacher, self.temperature))

    def backward(
        self, dloss: Tensor, logits: Tensor, teacher: Tensor, weight: Maybe, lse: Tensor, teacher_lse: Maybe
    ) -> Tensor:
        op = ops.op(self.backend, "distillation_backward")
        return op(dloss, logits, lse, teacher, teacher_lse, self.temperature)


Plan = CrossEntropy | Distillation


def _loss(plan: Plan, *arguments: Any) -> Tensor:
    """The losses alone; differentiable."""
    return plan.plain(*arguments)[0]


def _gradient(plan: Plan, dloss: Tensor, logits: Tensor, target: Tensor, weight: Maybe) -> Tensor:
    """The gradient of the logits; differentiable, lse being a function of the logits here."""
    return torch.func.vjp(lambda x: _loss(plan, x, target, weight), logits)[1](dloss)[0]


class _RowLoss(Function):
    """(loss, lse ...). Saves the logits, the target, the weight and lse."""

    @staticmethod
    @signature_read_once
    def forward(logits: Tensor, target: Tensor, weight: Maybe, plan: Plan) -> tuple[Tensor, ...]:
        return plan.forward(logits, target, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.plan = inputs
        _, lse, teacher_lse = output if len(output) == 3 else (*output, None)
        ctx.save_for_backward(*tensors, lse, teacher_lse)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Maybe, ...]:
        logits, target, weight, lse, teacher_lse = ctx.saved_tensors
        need_logits, need_target, need_weight, _ = ctx.needs_input_grad
        dlogits = dtarget = dweight = None
        if need_logits:
            dlogits = row_loss_backward(dloss, logits, target, weight, lse, teacher_lse, ctx.plan)
        if need_target or need_weight:
            found = gradients_of(lambda t, w: _loss(ctx.plan, logits, t, w), (target, weight), dloss)
            dtarget, dweight = (g if need else None for g, need in zip(found, (need_target, need_weight), strict=True))
        return dlogits, dtarget, dweight, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, logits: Tensor, target: Tensor, weight: Maybe, plan: Plan) -> Any:
        if in_dims[2] is not None:  # a weight of its own for each sample
            outputs = torch.vmap(plan.plain, in_dims[:3])(logits, target, weight)
        else:
            size = info.batch_size
            logits, target = (t.flatten(0, 1) for t in batched_together((logits, target), in_dims[:2], size))
            outputs = row_loss(logits, target, weight, plan)
            outputs = tuple(t.reshape(size, t.numel() // size) for t in outputs)
        return outputs, (0,) * len(outputs)


class _RowLossBackward(Function):
    """dlogits, from dloss, what was saved for backward and the plan."""

    @staticmethod
    @signature_read_once
    def forward(
        dloss: Tensor, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor, teacher_lse: Maybe, plan: Plan
    ) -> Tensor:
        return plan.backward(dloss, logits, target, weight, lse, teacher_lse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan = inputs[-1]
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Maybe, ...]:
        found = gradients_of(lambda *t: _gradient(ctx.plan, *t), ctx.saved_tensors, g)
        return *found, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        dloss, logits, target, weight, lse, teacher_lse, plan = inputs
        if in_dims[3] is not None:
            return torch.vmap(lambda *t: _gradient(plan, *t), in_dims[:4])(dloss, logits, target, weight), 0
        rows = (dloss, logits, target, lse, teacher_lse)
        together = batched_together(rows, (*in_dims[:3], *in_dims[4:6]), info.batch_size)
        dloss, logits, target, lse, teacher_lse = (None if t is None else t.flatten(0, 1) for t in together)
        dlogits = row_loss_backward(dloss, logits, target, weight, lse, teacher_lse, plan)
        return dlogits.unflatten(0, (info.batch_size, logits.shape[0] // info.batch_size)), 0


# Forward-mode AD lives in subclasses, for eager use only: under fullgraph Dynamo refuses a Function
# that defines jvp.
class _RowLossEager(_RowLoss):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Maybe, ...]:
        tangent, *rest = forward_derivative(ctx.plan.plain, ctx.saved_for_forward, tangents[:3])
        return tangent, *(None for _ in rest)


class _RowLossBackwardEager(_RowLossBackward):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        plain = lambda *t: (_gradient(ctx.plan, *t),)  # noqa: E731
        return forward_derivative(plain, ctx.saved_for_forward, tangents[:4])[0]


def row_loss(logits: Tensor, target: Tensor, weight: Maybe, plan: Plan) -> tuple[Tensor, ...]:
    """The loss of each row, and its log-sum-exp."""
    function = _RowLoss if torch.compiler.is_compiling() else _RowLossEager
    return function.apply(logits, target, weight, plan)


def row_loss_backward(*arguments: Any) -> Tensor:
    """dlogits; the arguments are those of ``_RowLossBackward.forward``."""
    function = _RowLossBackward if torch.compiler.is_compiling() else _RowLossBackwardEager
    return function.apply(*arguments)


def headroom(bound: Tensor) -> Tensor:
    """A power of two that takes ``|bound|`` to 2^13 ... 2^14: inside fp16, whose small numbers then keep their bits.

    Where nothing does, the largest: a row that is not finite, or 0, does not count in the least of several.
    """
    exponent = torch.frexp(torch.where(bound.isfinite(), bound, 0)).exponent
    exponent = torch.where(bound.isfinite() & (bound != 0), exponent, -100).clamp(min=-100)
    return torch.ldexp(torch.ones_like(bound), 14 - exponent)


class GradientInForward(Function):
    """The losses. Saves the gradient alone, made in the forward pass over the logits if asked to, and a factor a row.

    The loss scale comes later, in dloss, so in fp16 the gradient is kept with headroom (a power of two, exact to undo).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Maybe, plan: CrossEntropy, overwrite: bool) -> Tensor:
        loss, lse = plan.forward(logits, target, weight)
        scale = torch.ones_like(lse)
        if logits.dtype == torch.float16:
            scale = headroom(plan.bound(target, weight, lse))
        if overwrite:
            plan.backward_(scale, logits, target, weight, lse)
            torch.autograd.graph.increment_version(logits)
            gradient = logits
        else:
            gradient = plan.backward(scale, logits, target, weight, lse)
        ctx.save_for_backward(gradient, scale)
        ctx.used = False
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Maybe, ...]:
        several = batched(dloss)  # is_grads_batched
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise RuntimeError("cross_entropy: got create_graph=True, which grad_in_forward=True does not go with")
            if ctx.used:
                raise RuntimeError(
                    "cross_entropy: a second backward pass through grad_in_forward=True, which gave its gradient away"
                    " in the first; leave grad_in_forward out here"
                )
            ctx.used = not several
        gradient, scale = ctx.saved_tensors
        if several or torch.compiler.is_compiling():
            return (gradient * (dloss / scale)[:, None]).to(gradient.dtype), None, None, None, None
        return times_rows_(gradient.detach(), dloss / scale), None, None, None, None


def times_rows_(x: Tensor, factors: Tensor) -> Tensor:
    """x times the factor of each row, over x; in slices, since on the CPU PyTorch multiplies a wider copy."""
    rows = max(1, 2**22 // max(1, x.shape[1]))
    if x.shape[0] <= rows:
        return x.mul_(factors[:, None])
    for some, factor in zip(x.split(rows), factors.split(rows), strict=True):
        some.mul_(factor[:, None])
    return x

"""The autograd Function of linear_cross_entropy: a chunk of the logits at a time.

With logits = h W^T + b (rows, classes), and G the gradient of the logits,
    dh = G W,    dW = G^T h,    db = G^T 1,
where each chunk of rows has its own part of G and dh, and adds to dW and db.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memkern import ops
from memkern.functional.common import batched, gradients_of, without_autocast
from memkern.functional.cross_entropy_autograd import CrossEntropy, headroom, row_loss, times_rows_

Maybe = Tensor | None
BLOCK = 2**23  # elements of dW that a product is added to at a time, where that takes a temporary copy


@dataclass(frozen=True)
class Plan:
    """What linear_cross_entropy computes."""

    loss: CrossEntropy
    chunk: int  # tokens
    dtype: torch.dtype  # of the logits
    summed: bool  # the losses are added up
    in_forward: bool  # gradients are made in the forward pass; only where they are summed


def differentiable(
    plan: Plan, hidden: Tensor, weight: Tensor, bias: Maybe, target: Tensor, class_weight: Maybe
) -> Tensor:
    """The loss by way of all logits at once, for derivatives of any kind."""
    with without_autocast(hidden):
        h, w, b = (None if t is None else t.to(plan.dtype) for t in (hidden, weight, bias))
        loss = row_loss(torch.nn.functional.linear(h, w, b), target, class_weight, plan.loss)[0]
    return loss.sum() if plan.summed else loss


@dataclass
class Gradients:
    """dh, dW and db, as far as they are needed, in fp32 (dh in bf16 for bf16 logits, whose range is that of fp32)."""

    hidden: Maybe
    weight: Maybe
    bias: Maybe

    @classmethod
    def zeros(
        cls, hidden: Tensor, weight: Tensor, bias: Maybe, needs: tuple[bool, ...], dtype: torch.dtype
    ) -> Gradients:
        wide = torch.promote_types(dtype, torch.float32)
        kept = torch.bfloat16 if dtype == torch.bfloat16 else wide
        return cls(
            torch.empty_like(hidden, dtype=kept, memory_format=torch.contiguous_format) if needs[0] else None,
            torch.zeros_like(weight, dtype=wide, memory_format=torch.contiguous_format) if needs[1] else None,
            torch.zeros_like(bias, dtype=wide) if bias is not None and needs[2] else None,
        )

    def add(self, start: int, g: Tensor, hidden: Tensor, weight: Tensor, undo: Maybe) -> None:
        """The part of a chunk of tokens that begins at ``start``; ``undo``: what its g is to be multiplied by."""
        if self.hidden is not None:
            part = self.hidden[start : start + len(g)]
            if undo is None:
                torch.mm(g, weight, out=part)
            else:
                torch.mul(_product(g, weight), undo, out=part)
        if self.weight is not None:
            _add_product(self.weight, g, hidden, undo)
        if self.bias is not None:
            _add_product(self.bias[:, None], g, torch.ones_like(hidden[:, :1]), undo)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b; in fp32 for fp16, whose range the sums may leave."""
    if a.dtype != torch.float16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _add_product(total: Tensor, g: Tensor, h: Tensor, undo: Maybe) -> None:
    """total += g^T h, undone."""
    if g.dtype == total.dtype:
        total.addmm_(g.t(), h)
        return
    rows = max(1, BLOCK // max(1, total.shape[1]))
    for some, part in zip(total.split(rows), g.split(rows, 1), strict=True):
        product = torch.mm(part.t(), h, out_dtype=total.dtype) if g.is_cuda else _product(part.t(), h)
        some.add_(product) if undo is None else some.addcmul_(product, undo)


def _run(
    plan: Plan, dloss: Maybe, needs: tuple[bool, ...], lse: Maybe,
    hidden: Tensor, weight: Tensor, bias: Maybe, target: Tensor, class_weight: Maybe,
) -> tuple[Tensor, Tensor, Gradients]:  # fmt: skip
    """Loss and lse of each row, unless lse is given; and the gradients of sum(dloss loss) that are needed."""
    with without_autocast(hidden):
        gradients = Gradients.zeros(hidden, weight, bias, needs, plan.dtype)
        w, b = weight.to(plan.dtype), None if bias is None else bias.to(plan.dtype)
        losses, lses = [], []
        for start in range(0, hidden.shape[0], plan.chunk):
            rows = slice(start, start + plan.chunk)
            h, targets = hidden[rows].to(plan.dtype), target[rows]
            logits = h @ w.t() if b is None else torch.addmm(b, h, w.t())
            if lse is None:
                loss, saved = plan.loss.forward(logits, targets, class_weight)
                losses.append(loss)
                lses.append(saved)
            else:
                saved = lse[rows]
            if dloss is not None:
                scale, undo = dloss[rows], None
                if plan.dtype == torch.float16:  # no gradient is to underflow, now that the loss scale comes later
                    factor = headroom(plan.loss.bound(targets, class_weight, saved) * scale).amin()
                    scale, undo = scale * factor, 1 / factor
                plan.loss.backward_(scale, logits, targets, class_weight, saved)
                gradients.add(start, logits, h, w, undo)
        if lse is not None:
            return lse, lse, gradients
        if len(losses) == 1:
            return losses[0], lses[0], gradients
        empty = hidden.new_empty(0, dtype=ops.computed_in(hidden))
        return torch.cat([empty, *losses]), torch.cat([empty, *lses]), gradients


# A compiler that traced the loop of _run would unroll it, and so fix the number of tokens: it sees one op.
_SCHEMA = (
    "linear_cross_entropy(Tensor? dloss, Tensor? lse, Tensor hidden, Tensor weight, Tensor? bias, Tensor target,"
    " Tensor? class_weight, bool[] needs, SymInt chunk, ScalarType dtype, int ignore_index, float label_smoothing,"
    " float z_loss, float softcap, str backend) -> (Tensor loss, Tensor lse, Tensor dhidden, Tensor dweight,"
    " Tensor dbias)"
)


def _op(dloss, lse, hidden, weight, bias, target, class_weight, needs, chunk, dtype, *options):
    """What there is none of has no elements."""
    plan = Plan(CrossEntropy(*options), chunk, dtype, summed=False, in_forward=False)
    arguments = (hidden, weight, bias, target, class_weight)
    losses, saved, made = _run(plan, dloss, tuple(needs), lse, *arguments)
    losses, saved = (losses, saved) if lse is None else (None, None)
    nothing = hidden.new_empty(0)
    return tuple(nothing.clone() if t is None else t for t in (losses, saved, made.hidden, made.weight, made.bias))


def _fake(dloss, lse, hidden, weight, bias, target, class_weight, needs, chunk, dtype, *options):
    rows = hidden.shape[0] if lse is None else 0
    losses = (hidden.new_empty(rows, dtype=ops.computed_in(hidden)) for _ in range(2))
    made = Gradients.zeros(hidden, weight, bias, tuple(needs), dtype)
    return *losses, *(hidden.new_empty(0) if g is None else g for g in (made.hidden, made.weight, made.bias))


_library = torch.library.Library("memkern", "DEF")  # noqa: TOR901 - lives as long as the process
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("linear_cross_entropy", _op, "CompositeExplicitAutograd")
torch.library.register_fake("memkern::linear_cross_entropy", _fake, lib=_library)


def _made(
    plan: Plan, dloss: Maybe, needs: tuple[bool, ...], lse: Maybe, *arguments: Any
) -> tuple[Tensor, Tensor, Gradients]:
    """_run, or the op."""
    if not torch.compiler.is_compiling():
        return _run(plan, dloss, needs, lse, *arguments)
    options = dataclasses.astuple(plan.loss)
    losses, saved, *gradients = torch.ops.memkern.linear_cross_entropy(
        dloss, lse, *arguments, needs, plan.chunk, plan.dtype, *options
    )
    made = Gradients(*(g if need else None for g, need in zip(gradients, needs, strict=True)))
    return losses, saved, made


class LinearCrossEntropy(Function):
    """The loss of each row, or their sum. Saves its arguments and lse; made in the forward pass, the gradients, too.

    Those are given away in the first backward pass. A second one, and every one of losses that are not summed, makes
    the logits again, a chunk at a time.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *arguments: Any) -> Tensor:
        hidden, needs, dloss = arguments[0], (False,) * 3, None
        if plan.in_forward:
            needs, dloss = ctx.needs_input_grad[1:4], hidden.new_ones(hidden.shape[0], dtype=ops.computed_in(hidden))
        losses, lse, made = _made(plan, dloss, needs, None, *arguments)
        ctx.save_for_backward(*arguments, lse, made.hidden, made.weight, made.bias)
        ctx.plan, ctx.made = plan, plan.in_forward
        return losses.sum() if plan.summed else losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Maybe, ...]:
        *arguments, lse, dhidden, dweight, dbias = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad[1:]
        several = batched(dloss)  # is_grads_batched
        if torch.is_grad_enabled() or (several and not ctx.made):  # create_graph
            found = gradients_of(lambda *t: differentiable(plan, *t), arguments, dloss)
            return None, *(g if need else None for g, need in zip(found, needs, strict=True))
        if ctx.made:
            keep = several or torch.compiler.is_compiling()  # a compiler plans the memory
            found = [None if g is None else _times(g, dloss, keep) for g in (dhidden, dweight, dbias)]
            ctx.made = several
        else:
            made = _made(plan, dloss.expand_as(lse), needs[:3], lse, *arguments)[2]
            found = [made.hidden, made.weight, made.bias]
        gradients = (None if g is None else g.to(t.dtype) for g, t in zip(found, arguments, strict=False))
        return None, *gradients, None, None


def _times(gradient: Tensor, factor: Tensor, keep: bool) -> Tensor:
    """The product with the one factor, in fp32; over the gradient, unless that is to be kept.

    .data has no version: what backward saved may be changed, since it does not read it a second time.
    """
    if keep:
        return (gradient * factor.reshape((1,) * gradient.dim())).to(gradient.dtype)
    if gradient.dtype == factor.dtype:
        return gradient.data.mul_(factor)
    rows = gradient.data if gradient.dim() == 2 else gradient.data[:, None]
    times_rows_(rows, factor.expand(len(rows)))
    return gradient.data

"""The autograd Functions of softmax and log-softmax.

Derivatives beyond the fused gradient are those of the plain formulas of the reference: right, not fused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memkern import ops
from memkern.functional.common import batched_together, forward_derivative, signature_read_once
from memkern.functional.reuse import alone, holders, watched
from memkern.reference.softmax import IMPLEMENTATIONS, apply_dropout

Maybe = Tensor | None


@dataclass(frozen=True)
class Plan:
    """What a softmax computes, and on what. The names are those of the ops."""

    dim: int  # below 0: a dimension that vmap adds comes first
    scale: float
    causal: bool
    log: bool
    zero_masked: bool
    dropout: float
    dtype: torch.dtype  # of y
    overwrite: bool  # dx may take the place of the incoming gradient
    backend: str

    def _op(self, direction: str, plain: bool = False) -> Any:
        name = f"softmax_{direction}"
        return IMPLEMENTATIONS[name] if plain else ops.op(self.backend, name)

    def forward(self, x: Tensor, mask: Maybe, seed: Maybe, plain: bool = False) -> tuple[Tensor, Tensor]:
        """y, and what dropout makes of it (no elements without); ``plain``: differentiable. ``mask`` broadcasts."""
        mask = None if mask is None else mask.expand(x.shape)
        options = self.scale, self.causal, self.log, self.zero_masked, self.dropout
        return self._op("forward", plain)(x, mask, self.dim % x.dim(), *options, seed, self.dtype)

    def _backward_options(self, y: Tensor, seed: Maybe) -> tuple[Any, ...]:
        return self.dim % y.dim(), self.scale, self.causal, self.log, self.dropout, seed

    def backward(self, dy: Tensor, y: Tensor, seed: Maybe, dtype: torch.dtype, plain: bool = False) -> Tensor:
        """dx in ``dtype``; ``plain``: differentiable."""
        return self._op("backward", plain)(dy, y, *self._backward_options(y, seed), dtype)

    def backward_over(self, dy: Tensor, y: Tensor, seed: Maybe) -> Tensor:
        """dx, in the memory of ``dy``."""
        self._op("backward_")(dy, y, *self._backward_options(y, seed))
        torch.autograd.graph.increment_version(dy)
        return dy


class _Softmax(Function):
    """(y, dropped). Saves y, and the seed of dropout."""

    @staticmethod
    @signature_read_once
    def forward(x: Tensor, mask: Maybe, seed: Maybe, plan: Plan) -> tuple[Tensor, Tensor]:
        return plan.forward(x, mask, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, mask, seed, ctx.plan = inputs
        y, dropped = output
        ctx.dtype = x.dtype
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)
        ctx.save_for_backward(y, seed)
        ctx.save_for_forward(x, mask, seed)  # until the forward pass is over
        ctx.set_materialize_grads(False)
        # Beside dropped, y has a gradient in second derivatives only, and there are none under torch.compile.
        dropout = ctx.plan.dropout > 0
        ctx.differentiable = not (dropout and torch.compiler.is_compiling()), dropout
        ctx.mark_non_differentiable(*(t for t, yes in zip(output, ctx.differentiable, strict=True) if not yes))

    @staticmethod
    def backward(ctx: Any, dy: Maybe, ddropped: Maybe) -> tuple[Maybe, Maybe, None, None]:
        plan, (y, seed) = ctx.plan, ctx.saved_tensors
        held = None
        wanted = plan.overwrite and ctx.needs_input_grad[0]
        if wanted and _can_overwrite(ddropped if plan.dropout > 0 else dy, ctx.dtype):
            held = holders(ddropped if plan.dropout > 0 else dy)  # before anything here holds it, too
        # Dynamo passes something for every output.
        steps = [
            (gradient, replace(plan, dropout=dropout))
            for gradient, dropout, yes in zip((dy, ddropped), (0.0, plan.dropout), ctx.differentiable, strict=True)
            if yes and gradient is not None
        ]
        dx = dmask = None
        if ctx.needs_input_grad[1]:
            for gradient, step in steps:
                found = _mask_gradient(gradient, y, seed, replace(step, scale=1.0), *ctx.mask)
                dmask = found if dmask is None else dmask + found
        if held is not None:
            if held not in alone(y.device):
                raise RuntimeError(HELD)
            return plan.backward_over(steps[0][0], y, seed), dmask, None, None
        if ctx.needs_input_grad[0]:
            for gradient, step in steps:
                found = softmax_backward(gradient, y, seed, step, ctx.dtype)
                dx = found if dx is None else dx + found
        return dx, dmask, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, mask: Maybe, seed: Maybe, plan: Plan) -> Any:
        if plan.dropout > 0:  # a sample's random numbers do not depend on its place in the batch
            return torch.vmap(partial(plan.forward, plain=True), in_dims[:3])(x, mask, seed), (0, 0)
        x, mask = batched_together((x, mask), in_dims[:2], info.batch_size)
        return softmax(x, mask, seed, plan), (0, None)


HELD = (
    "inplace_backward: the gradient of the output is held elsewhere, too (by the caller of backward, by a hook or by"
    " another consumer of it), and would be overwritten there; leave inplace_backward out here"
)


def _can_overwrite(dy: Maybe, dtype: torch.dtype) -> bool:
    """Whether dx fits in the place of ``dy``, and this is a backward pass of which nothing is recorded."""
    if dy is None or type(dy) is not Tensor or torch._C._are_functorch_transforms_active():
        return False
    if watched() or not torch._C._has_storage(dy):  # which is_grads_batched hides
        return False
    if torch.is_grad_enabled():
        raise RuntimeError("inplace_backward: got create_graph=True, which needs the gradient that is overwritten")
    return dy.is_contiguous() and dy.dtype == dtype


class _SoftmaxBackward(Function):
    """dx, from dy, what was saved for backward, the plan and the dtype of dx."""

    @staticmethod
    @signature_read_once
    def forward(dy: Tensor, y: Tensor, seed: Maybe, plan: Plan, dtype: torch.dtype) -> Tensor:
        return plan.backward(dy, y, seed, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, y, seed, plan, dtype = inputs
        ctx.plan, ctx.dtype = plan, dtype
        ctx.save_for_backward(dy, y, seed)
        ctx.save_for_forward(dy, y, seed)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dy, y, seed = ctx.saved_tensors
        plain = partial(ctx.plan.backward, seed=seed, dtype=ctx.dtype, plain=True)
        return *torch.func.vjp(plain, dy, y)[1](g), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, dy: Tensor, y: Tensor, seed: Maybe, plan: Plan, dtype: torch.dtype) -> Any:
        if plan.dropout > 0:
            return torch.vmap(partial(plan.backward, dtype=dtype, plain=True), in_dims[:3])(dy, y, seed), 0
        dy, y = batched_together((dy, y), in_dims[:2], info.batch_size)
        return softmax_backward(dy, y, seed, plan, dtype), 0


# Forward-mode AD lives in subclasses, for eager use only: under fullgraph Dynamo refuses a Function
# that defines jvp.
class _SoftmaxEager(_Softmax):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Maybe, ...]:
        x, mask, seed = ctx.saved_for_forward
        plain = partial(ctx.plan.forward, seed=seed, plain=True)
        if mask is not None and mask.dtype == torch.bool:
            outputs = forward_derivative(partial(plain, mask=mask), (x,), tangents[:1])
        else:
            outputs = forward_derivative(plain, (x, mask), tangents[:2])
        return tuple(t if yes else None for t, yes in zip(outputs, ctx.differentiable, strict=True))


class _SoftmaxBackwardEager(_SoftmaxBackward):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        dy, y, seed = ctx.saved_for_forward
        plain = partial(ctx.plan.backward, seed=seed, dtype=ctx.dtype, plain=True)
        return forward_derivative(lambda *t: (plain(*t),), (dy, y), tangents[:2])[0]


def softmax(x: Tensor, mask: Maybe, seed: Maybe, plan: Plan) -> tuple[Tensor, Tensor]:
    """y, and what dropout makes of it (no elements without)."""
    function = _Softmax if torch.compiler.is_compiling() else _SoftmaxEager
    return function.apply(x, mask, seed, plan)


def softmax_backward(*arguments: Any) -> Tensor:
    """dx; the arguments are those of ``_SoftmaxBackward.forward``."""
    function = _SoftmaxBackward if torch.compiler.is_compiling() else _SoftmaxBackwardEager
    return function.apply(*arguments)


CHUNK = 2**22  # elements, of which the gradient of a mask is made and summed at a time


def _mask_gradient(dy: Tensor, y: Tensor, seed: Maybe, plan: Plan, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradient of an additive mask of that shape and dtype; the plan's scale is 1."""
    if shape == y.shape and dtype == y.dtype:
        return softmax_backward(dy, y, seed, plan, dtype)
    wide = ops.computed_in(y)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return softmax_backward(dy.to(wide), y.to(wide), seed, plan, wide).sum_to_size(shape).to(dtype)
    if y.dim() == 1:
        return _mask_gradient(dy[None], y[None], seed, plan, torch.Size((1, *shape)), dtype)[0]
    total = y.new_zeros(shape, dtype=wide)
    of_chunk, start, keys = replace(plan, dropout=0.0), 0, y.shape[-1]
    for place in _chunks(y.shape):
        g, p = dy[place].to(wide), y[place].to(wide)
        if plan.dropout > 0:
            g = apply_dropout(g, plan.dropout, seed, start)
            start += g.numel()
        if plan.causal and len(place) == y.dim() - 1:  # no query of the chunk sees more keys, and the last sees these
            keys = max(y.shape[-1] - y.shape[-2] + place[-1].stop, 0)
        if keys > 0:
            dz = of_chunk.backward(g[..., :keys], p[..., :keys], None, wide)
            at = tuple(slice(1) if size == 1 else part for part, size in zip(place, shape, strict=False))
            target = total[at][..., :keys]
            target += dz.sum_to_size(target.shape)
            del g, p, dz  # before there is another of each
    return total.to(dtype)


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Parts of a tensor that are contiguous, one after the other, each of up to CHUNK elements or a row."""
    cut = next((d for d in range(len(shape) - 2) if math.prod(shape[d + 1 :]) <= CHUNK), len(shape) - 2)
    step = max(CHUNK // max(math.prod(shape[cut + 1 :]), 1), 1)
    for outer in itertools.product(*map(range, shape[:cut])):
        for first in range(0, shape[cut], step):
            yield (*(slice(i, i + 1) for i in outer), slice(first, min(first + step, shape[cut])))

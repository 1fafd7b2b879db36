"""The autograd Functions of LayerNorm and RMSNorm, which are one here: RMSNorm has neither mean nor bias.

Derivatives beyond the fused gradient are those of the plain formulas below: right, not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memkern import ops
from memkern.functional.common import batched_together, forward_derivative, gradients_of, signature_read_once
from memkern.reference.common import wide
from memkern.reference.norm import IMPLEMENTATIONS

Maybe = Tensor | None


@dataclass(frozen=True)
class Plan:
    """What a norm computes, saves and runs on."""

    name: str  # "layer_norm" or "rms_norm"
    columns: int  # elements of a row
    eps: float
    zero_centred: bool
    from_y: bool  # y is saved for backward, in place of the tensor that is normalised
    backend: str

    def _op(self, direction: str, plain: bool) -> Any:
        name = f"{self.name}_{direction}"
        return IMPLEMENTATIONS[name] if plain else ops.op(self.backend, name)

    def forward(
        self, x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, plain: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y, summed (no elements without residual), mean (none for RMSNorm) and rstd; ``plain``: differentiable."""
        op = self._op("forward", plain)
        if self.name == "layer_norm":
            return op(x, residual, weight, bias, self.columns, self.eps)
        y, summed, rstd = op(x, residual, weight, self.columns, self.eps, self.zero_centred)
        return y, summed, rstd.new_empty(0), rstd

    def backward(
        self, dy: Tensor, dsummed: Maybe, source: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor,
        needs: tuple[bool, bool, bool], plain: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dx, dweight and dbias, with no elements where they are not needed; ``plain``: differentiable."""
        op = self._op("backward", plain)
        if self.name == "layer_norm":
            return op(dy, dsummed, source, weight, bias, mean, rstd, self.columns, self.from_y, *needs)
        dx, dweight = op(dy, dsummed, source, weight, rstd, self.columns, self.zero_centred, self.from_y, *needs[:2])
        return dx, dweight, dx.new_empty(0)

    def through_statistics(
        self, dmean: Maybe, drstd: Maybe, source: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, rstd: Tensor
    ) -> Tensor:
        """The gradient that reaches x through mean and rstd: only a second derivative sends one."""
        rows = wide(source).reshape(rstd.numel(), self.columns)
        if self.from_y:
            rows = rows if bias is None else rows - wide(bias).flatten()
            x_hat = rows if weight is None else rows / (wide(weight).flatten() + self.zero_centred)
        else:
            x_hat = (rows - wide(mean)[:, None] if mean.numel() else rows) * wide(rstd)[:, None]
        dx = torch.zeros_like(x_hat)
        if dmean is not None:
            dx = dx + wide(dmean)[:, None] / self.columns
        if drstd is not None:
            dx = dx - (wide(drstd) * wide(rstd).square())[:, None] * x_hat / self.columns
        return dx.to(source.dtype).reshape(source.shape)

    def poisoned(self, weight: Maybe, bias: Maybe) -> tuple[Maybe, Maybe]:
        """weight and bias for a backward pass from y; NaN where a change PyTorch did not see made that unsound."""
        if not self.from_y or (weight is None and bias is None):
            return weight, bias
        sound = y_tells_x(weight, bias, self.zero_centred)
        if weight is None:
            return None, torch.where(sound, bias, torch.nan)
        return torch.where(sound, weight, torch.nan), bias


SMALLEST_SCALE = 2.0**-7
LARGEST_BIAS = 4.0


def y_tells_x(weight: Maybe, bias: Maybe, zero_centred: bool) -> Tensor:
    """Whether x_hat = (y - bias) / scale is accurate: every |scale| >= 2^-7 and every |bias| <= 4 |scale|. A 0-d bool.

    y carries half an ulp of |x_hat scale + bias|, so x_hat comes out with at most |x_hat| + |bias / scale| half ulps,
    and the lower limit keeps fp16's subnormals out of it. A NaN is never sound.
    """
    scale = torch.ones((), device=bias.device) if weight is None else (weight.detach().float() + zero_centred).abs()
    sound = scale >= SMALLEST_SCALE
    if bias is not None:
        sound = sound & (bias.detach().float().abs() <= LARGEST_BIAS * scale)
    return sound.all()


class _Norm(Function):
    """(y, summed, mean, rstd). Saves x (summed where there is a residual; or y), the statistics and the parameters."""

    @staticmethod
    @signature_read_once
    def forward(x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, plan: Plan) -> tuple[Tensor, ...]:
        return plan.forward(x, residual, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, residual, weight, bias, ctx.plan = inputs
        y, summed, mean, rstd = output
        source = y if ctx.plan.from_y else x if residual is None else summed
        ctx.save_for_backward(source, weight, bias, mean, rstd)
        ctx.save_for_forward(x, residual, weight, bias)
        ctx.set_materialize_grads(False)
        # Only second derivatives go through the statistics, and there are none under torch.compile.
        compiling = torch.compiler.is_compiling()
        ctx.differentiable = True, residual is not None, mean.numel() > 0 and not compiling, not compiling
        ctx.mark_non_differentiable(*(t for t, yes in zip(output, ctx.differentiable, strict=True) if not yes))

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> tuple[Maybe, ...]:
        # Dynamo passes something for every output.
        dy, dsummed, dmean, drstd = (g if yes else None for g, yes in zip(gradients, ctx.differentiable, strict=True))
        source, weight, bias, mean, rstd = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias, _ = ctx.needs_input_grad
        saved = (source, *ctx.plan.poisoned(weight, bias), mean, rstd)
        dx, dweight, dbias = dsummed, None, None
        if dy is not None:
            needs = (need_x or need_residual, need_weight, need_bias)
            dx, dweight, dbias = norm_backward(dy, dsummed, *saved, ctx.plan, *needs)
        if dmean is not None or drstd is not None:
            extra = ctx.plan.through_statistics(dmean, drstd, *saved)
            dx = extra if dx is None else dx + extra
        found = (dx, dx, dweight, dbias)
        return *(g if need else None for g, need in zip(found, ctx.needs_input_grad[:4], strict=True)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, plan: Plan) -> Any:
        if in_dims[2] is not None or in_dims[3] is not None:  # parameters of their own for each sample
            plain = partial(plan.forward, plain=True)
            return torch.vmap(plain, in_dims[:4])(x, residual, weight, bias), (0, 0, 0, 0)
        size = info.batch_size
        x, residual = batched_together((x, residual), in_dims[:2], size)
        y, summed, mean, rstd = norm(x, residual, weight, bias, plan)
        mean, rstd = (t.reshape(size, t.numel() // size) for t in (mean, rstd))
        return (y, summed, mean, rstd), (0, None if residual is None else 0, 0, 0)


class _NormBackward(Function):
    """dx, dweight and dbias, from dy, dsummed, what was saved for backward, the plan and which of them are needed."""

    @staticmethod
    @signature_read_once
    def forward(dy, dsummed, source, weight, bias, mean, rstd, plan, need_dx, need_dweight, need_dbias):
        needs = (need_dx, need_dweight, need_dbias)
        return plan.backward(dy, dsummed, source, weight, bias, mean, rstd, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, plan, need_dx, need_dweight, need_dbias = inputs
        ctx.needs = (need_dx, need_dweight, need_dbias)
        ctx.plain = partial(plan.backward, needs=ctx.needs, plain=True)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(gradient for gradient, need in zip(output, ctx.needs, strict=True) if not need))

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Maybe, ...]:
        return *gradients_of(ctx.plain, ctx.saved_tensors, found), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        *tensors, plan, need_dx, need_dweight, need_dbias = inputs
        if need_dweight or need_dbias or in_dims[3] is not None or in_dims[4] is not None:  # of each sample its own
            plain = partial(plan.backward, needs=(need_dx, need_dweight, need_dbias), plain=True)
            return torch.vmap(plain, in_dims[:7])(*tensors), (0, 0, 0)
        size = info.batch_size
        dy, dsummed, source = batched_together(tensors[:3], in_dims[:3], size)
        mean, rstd = (t.flatten() for t in batched_together(tensors[5:], in_dims[5:7], size))
        gradients = norm_backward(dy, dsummed, source, *tensors[3:5], mean, rstd, plan, need_dx, False, False)
        return gradients, (0, None, None)


# Forward-mode AD lives in subclasses, for eager use only: under fullgraph Dynamo refuses a Function
# that defines jvp.
class _NormEager(_Norm):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        plain = partial(ctx.plan.forward, plain=True)
        outputs = forward_derivative(plain, ctx.saved_for_forward, tangents[:4])
        return tuple(t if yes else None for t, yes in zip(outputs, ctx.differentiable, strict=True))


class _NormBackwardEager(_NormBackward):
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        gradients = forward_derivative(ctx.plain, ctx.saved_for_forward, tangents[:7])
        return tuple(t if need else None for t, need in zip(gradients, ctx.needs, strict=True))


def norm(x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, plan: Plan) -> tuple[Tensor, ...]:
    """y, summed (no elements without residual), mean and rstd."""
    function = _Norm if torch.compiler.is_compiling() else _NormEager
    return function.apply(x, residual, weight, bias, plan)


def norm_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias; the arguments are those of ``_NormBackward.forward``."""
    function = _NormBackward if torch.compiler.is_compiling() else _NormBackwardEager
    return function.apply(*arguments)

"""GELU and its autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from memkern import backends, ops
from memkern.functional.common import batched_together, floating, one_of, signature_read_once
from memkern.reference.common import wide
from memkern.reference.gelu import gelu_second_derivative


class _GELU(Function):
    """y = gelu(x). Saves x, nothing else."""

    @staticmethod
    @signature_read_once
    def forward(x: Tensor, approximate: str, backend: str) -> Tensor:
        return ops.op(backend, "gelu_forward")(x, approximate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.approximate, ctx.backend = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return _gelu_backward(dy, x, ctx.approximate, ctx.backend), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, approximate: str, backend: str
    ) -> tuple[Tensor, int]:
        return _gelu(x, approximate, backend), in_dims[0]


class _GELUBackward(Function):
    """dx = dy gelu'(x); its own gradients are g gelu'(x) for dy and g dy gelu''(x) for x."""

    @staticmethod
    @signature_read_once
    def forward(dy: Tensor, x: Tensor, approximate: str, backend: str) -> Tensor:
        return ops.op(backend, "gelu_backward")(dy, x, approximate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dy, x, ctx.approximate, ctx.backend = inputs
        ctx.save_for_backward(dy, x)
        ctx.save_for_forward(dy, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dy, x = ctx.saved_tensors
        return (
            _gelu_backward(g, x, ctx.approximate, ctx.backend),
            _times_curvature(g, dy, x, ctx.approximate),
            None,
            None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, dy: Tensor, x: Tensor, approximate: str, backend: str) -> tuple[Tensor, int]:
        dy, x = batched_together((dy, x), in_dims[:2], info.batch_size)
        return _gelu_backward(dy, x, approximate, backend), 0


def _times_curvature(g: Tensor, dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return (wide(g) * wide(dy) * gelu_second_derivative(x, approximate)).to(x.dtype)


# Forward-mode AD lives in subclasses, for eager use only: under fullgraph Dynamo refuses a Function
# that defines jvp.
class _GELUEager(_GELU):
    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:
        (x,) = ctx.saved_for_forward
        return _gelu_backward(x_tangent, x, ctx.approximate, ctx.backend)


class _GELUBackwardEager(_GELUBackward):
    @staticmethod
    def jvp(ctx: Any, dy_tangent: Tensor | None, x_tangent: Tensor | None, *_: None) -> Tensor:
        dy, x = ctx.saved_for_forward
        tangent = torch.zeros_like(x)
        if dy_tangent is not None:
            tangent = tangent + _gelu_backward(dy_tangent, x, ctx.approximate, ctx.backend)
        if x_tangent is not None:
            tangent = tangent + _times_curvature(x_tangent, dy, x, ctx.approximate)
        return tangent


def _gelu(x: Tensor, approximate: str, backend: str) -> Tensor:
    function = _GELU if torch.compiler.is_compiling() else _GELUEager
    return function.apply(x, approximate, backend)


def _gelu_backward(dy: Tensor, x: Tensor, approximate: str, backend: str) -> Tensor:
    function = _GELUBackward if torch.compiler.is_compiling() else _GELUBackwardEager
    return function.apply(dy, x, approximate, backend)


GELU_FORMS = ("none", "tanh")


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU, in place of ``torch.nn.functional.gelu``.

    ``x Phi(x)`` with the normal distribution function Phi (``approximate="none"``), or
    ``x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` (``"tanh"``); Hendrycks & Gimpel 2016,
    arXiv:1606.08415. Arithmetic is fp32 (fp64 for fp64) with one rounding at the end; the far negative
    tail, infinities and huge inputs are right where the textbook form loses them.

    Args:
        input: any shape and strides; float16, bfloat16, float32 or float64.
        approximate: ``"none"`` or ``"tanh"``.

    Returns:
        A tensor of the input's shape, dtype and (where it is dense) strides. Backward needs the input
        only.

    Raises:
        TypeError: ``input`` is not a tensor of those dtypes.
        ValueError: another ``approximate``.
    """
    x = floating("input", input)
    one_of("approximate", approximate, GELU_FORMS)
    return _gelu(x, approximate, backends.choose(x))

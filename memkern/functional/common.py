"""Checks, and rules of autograd and vmap, that every family uses."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memkern import backends

AUTOCAST = ("keep", "torch")


def floating(name: str, value: object) -> Tensor:
    """``value``, if it is a real floating tensor the kernels serve."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a Tensor")
    if value.dtype not in backends.DTYPES:
        raise TypeError(f"{name}: got dtype {value.dtype}, needs float16, bfloat16, float32 or float64")
    return dense(name, value)


def dense(name: str, value: Tensor) -> Tensor:
    """``value``, if it is neither sparse nor nested."""
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested" if value.is_nested else f"a {value.layout}"
        raise TypeError(f"{name}: got {kind} Tensor, needs a dense one")
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, needs {' or '.join(map(repr, allowed))}")


def number(name: str, value: object, fits: Callable[[float], bool], needed: str) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a number")
    if not fits(value):
        raise ValueError(f"{name}: got {value}, needs {needed}")


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Operations on tensors like ``x`` keep their dtypes inside."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def torch_dtype(function: Callable[..., Tensor], x: Tensor, *arguments: Any) -> torch.dtype:
    """The dtype that PyTorch's own ``function`` of a matrix and ``arguments`` returns for ``x``, here and now."""
    if not autocasts(x):
        return x.dtype
    return function(x.new_empty(0, 1), *arguments).dtype


def signature_read_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For the forward of a Function: ``apply`` takes some 13 us to read its signature at every call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def batched_together(tensors: Sequence[Any], in_dims: tuple[int | None, ...], size: int) -> tuple[Any, ...]:
    """Under vmap, the same tensors with the mapped dimension first in every one of them; None stays None."""
    return tuple(
        None if tensor is None else tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    )


def of_floating(f: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """``f`` as a function of those of its arguments alone that are floating tensors, and these."""
    given = [argument is not None and argument.is_floating_point() for argument in arguments]

    def g(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return f(*(next(rest) if here else argument for here, argument in zip(given, arguments, strict=True)))

    return g, [argument for here, argument in zip(given, arguments, strict=True) if here]


def gradients_of(f: Callable[..., Any], arguments: Sequence[Any], cotangent: Any) -> list[Any]:
    """Of each argument, the gradient that can be differentiated again; None where it is no floating tensor."""
    g, given = of_floating(f, arguments)
    found = iter(torch.func.vjp(g, *given)[1](cotangent))
    return [next(found) if a is not None and a.is_floating_point() else None for a in arguments]


def forward_derivative(f: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """The derivative of ``f`` along ``tangents``, by reverse mode twice: torch.func.jvp does not nest in forward_ad.

    Raises:
        NotImplementedError: under two levels of forward mode, of which PyTorch drops one in a Function's jvp.
    """
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1:
        raise NotImplementedError("forward mode in forward mode (torch.func.jacfwd of jacfwd); use torch.func.hessian")
    g, given = of_floating(f, primals)
    along = [
        torch.zeros_like(p) if t is None else t
        for p, t in zip(primals, tangents, strict=True)
        if p is not None and p.is_floating_point()
    ]
    with torch.enable_grad():
        zeros = tuple(torch.zeros_like(output) for output in g(*given))
        push = torch.func.vjp(lambda *u: torch.func.vjp(g, *given)[1](u), *zeros)[1]
        return push(tuple(along))

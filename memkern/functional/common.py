"""Checks and vmap rules that every family uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from memkern import backends


def floating(name: str, value: object) -> Tensor:
    """``value``, if it is a real floating tensor the kernels serve."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, needs a Tensor")
    if value.dtype not in backends.DTYPES:
        raise TypeError(f"{name}: got dtype {value.dtype}, needs float16, bfloat16, float32 or float64")
    return value


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, needs {' or '.join(map(repr, allowed))}")


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

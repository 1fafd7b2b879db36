"""Every op of the package: its schema, and its fake for tracing, on one page.

An op exists once per backend, under the same name and schema, in a namespace of its own:
``torch.ops.memkern_cuda.gelu_forward``, ``torch.ops.memkern_cpu.gelu_forward`` and so on. The native
libraries only add kernels to what is defined here. Ops have no autograd of their own: gradients come
from the Functions in ``functional.py``, which also check the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCHEMAS = {
    "gelu_forward": "(Tensor x, str approximate) -> Tensor",
    "gelu_backward": "(Tensor dy, Tensor x, str approximate) -> Tensor",
}


def _like_x(x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


def _like_x_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


FAKES: dict[str, Callable[..., Any]] = {
    "gelu_forward": _like_x,
    "gelu_backward": _like_x_backward,
}


def check_like(name: str, value: Tensor, x: Tensor) -> None:
    """Raise ValueError unless ``value`` has the shape, dtype and device of ``x``."""
    for what in ("shape", "dtype", "device"):
        got, needed = getattr(value, what), getattr(x, what)
        if got != needed:
            raise ValueError(f"{name}: got {what} {got}, needs that of x, {needed}")


_defined: dict[str, torch.library.Library] = {}


def define(backend: str) -> torch.library.Library:
    """Define every op in namespace ``memkern_<backend>``, once, and return the library."""
    if backend not in _defined:
        library = torch.library.Library(f"memkern_{backend}", "DEF")  # noqa: TOR901 - lives as long as the process
        for name, schema in SCHEMAS.items():
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"memkern_{backend}::{name}", FAKES[name], lib=library)
        _defined[backend] = library
    return _defined[backend]


def op(backend: str, name: str) -> Any:
    """The op ``name`` of ``backend``, ready to call."""
    return getattr(getattr(torch.ops, f"memkern_{backend}"), name).default

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

# What every optimizer step takes. lr_tensor, where given, is read instead of lr; a gradient is divided by
# grad_scale and multiplied by clip; nothing is written where found_inf is not 0. Each of them has one element.
_ON_DEVICE = "Tensor? lr_tensor, Tensor? grad_scale, Tensor? clip, Tensor? found_inf, float lr"

SCHEMAS = {
    "gelu_forward": "(Tensor x, str approximate) -> Tensor",
    "gelu_backward": "(Tensor dy, Tensor x, str approximate) -> Tensor",
    # -> fp32 (3,): 1 where a gradient / grad_scale is not finite, else 0; the norm of all of them; the
    # factor that brings it down to max_norm, at most 1
    "check_and_norm": "(Tensor[] grads, Tensor? grad_scale, float max_norm) -> Tensor",
    # adds 1 to every step where found_inf is 0 or not given, else 1 to skipped
    "advance": "(Tensor(a!)[] steps, Tensor(b!)? skipped, Tensor? found_inf) -> ()",
    # The lists are of one length; max_exp_avg_sqs and masters may be empty. A master is the fp32 parameter
    # that params then holds a rounded copy of. steps are those of advance, already advanced.
    "adamw_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    f"Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, Tensor[] steps, {_ON_DEVICE}, float beta1, float beta2, "
    "float eps, float weight_decay, bool decoupled, bool maximize, bool write_grads) -> ()",
    "sgd_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, Tensor(d!)[] masters, "
    f"Tensor[] steps, {_ON_DEVICE}, float momentum, float dampening, float weight_decay, bool nesterov, "
    "bool maximize, bool write_grads) -> ()",
    "lamb_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    f"Tensor(e!)[] masters, Tensor[] steps, {_ON_DEVICE}, float beta1, float beta2, float eps, "
    "float weight_decay, bool maximize, bool write_grads) -> ()",
    "lion_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] masters, "
    f"{_ON_DEVICE}, float beta1, float beta2, float weight_decay, bool maximize, bool write_grads) -> ()",
}


def _like_x(x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


def _like_x_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


def _check_and_norm(grads: list[Tensor], grad_scale: Tensor | None, max_norm: float) -> Tensor:
    return grads[0].new_empty(3, dtype=torch.float32)


def _nothing(*arguments: Any) -> None:
    pass


FAKES: dict[str, Callable[..., Any]] = {
    "gelu_forward": _like_x,
    "gelu_backward": _like_x_backward,
    "check_and_norm": _check_and_norm,
    "advance": _nothing,
    "adamw_step": _nothing,
    "sgd_step": _nothing,
    "lamb_step": _nothing,
    "lion_step": _nothing,
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

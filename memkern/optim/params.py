"""Parameters by name, and what the steps ask of them, their gradients and their states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkern import backends, ops


class Slot(NamedTuple):
    """A parameter and its place: parameter ``i`` of group ``number``."""

    group: dict[str, Any]
    number: int
    i: int
    p: Tensor

    @property
    def name(self) -> str:
        """What to call it in an error: its name, where the optimizer was given names."""
        names = self.group.get("param_names")
        return f"parameter {names[self.i]!r}" if names else f"parameter {self.i} of group {self.number}"


def slots_of(groups: list[dict[str, Any]]) -> Iterator[Slot]:
    for number, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            yield Slot(group, number, i, p)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)  # to ask for a method that is not there takes longer
    return tensor if plain or not hasattr(tensor, "to_local") else tensor.to_local()


def overlaps(x: Tensor) -> bool:
    """Whether elements share memory, as those of an expanded tensor do."""
    if x.is_contiguous():
        return False
    end = 0  # of what the inner dimensions span
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


def check_parameter(slot: Slot) -> None:
    p = slot.p
    if p.dtype not in backends.DTYPES or p.layout is not torch.strided:
        raise TypeError(
            f"{slot.name}: got {p.dtype}, {p.layout}, needs a dense float16, bfloat16, float32 or float64 tensor"
        )
    if overlaps(local(p)):
        raise ValueError(f"{slot.name}: got strides {p.stride()}, needs elements that do not share memory")


def check_gradient(slot: Slot) -> None:
    p, grad = slot.p, slot.p.grad
    if grad.layout is not torch.strided or grad.dtype not in backends.DTYPES or grad.device != p.device:
        raise TypeError(
            f"gradient of {slot.name}: got {grad.dtype}, {grad.layout} on {grad.device}, "
            f"needs a dense float16, bfloat16, float32 or float64 tensor on {p.device}"
        )


def check_state(slot: Slot, key: str, value: Any, param: Tensor) -> Tensor:
    """This rank's part of a state, which must lie in memory as ``param`` does; a step is one number beside it."""
    dtypes = (torch.float32,) if key in ("step", "master") else backends.DTYPES
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        got = value.dtype if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"state {key!r} of {slot.name}: got {got}, needs {' or '.join(map(str, dtypes))}")
    state = local(value)
    fits = state.numel() == 1 if key == "step" else state.shape == param.shape and ops.same_order(state, param)
    if not fits or state.device != param.device:
        needed = "one element" if key == "step" else f"{tuple(param.shape)}, {param.stride()}"
        got = f"shape {tuple(state.shape)}, strides {state.stride()} on {state.device}"
        raise ValueError(f"state {key!r} of {slot.name}: got {got}, needs {needed} on {param.device}")
    return state

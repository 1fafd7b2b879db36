"""Whether a gradient belongs to one backward pass alone, so that it may be overwritten."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes


def watched() -> bool:
    """Whether a debugger or the like may read the locals of frames here, and then holds what it finds in them."""
    if sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 has it
    return monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None


def holders(dy: Tensor) -> tuple[int, ...]:
    """How many references there are to the memory of ``dy``, to ``dy`` and, where it is a view, to what it views.

    To be called in the ``backward`` of a Function that takes two gradients, as `alone` measures it there, and not
    where that is `watched`.
    """
    storage = dy.untyped_storage()
    counts = [torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)]
    for tensor in (dy,) if dy._base is None else (dy, dy._base):
        counts += [sys.getrefcount(tensor), tensor._use_count()]  # type: ignore[attr-defined]
    return tuple(counts)


class _Probe(Function):
    @staticmethod
    def forward(x: Tensor, found: set[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        return x.clone(), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, ctx.found = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, None]:
        ctx.found.add(holders(dy))
        return dy, None


@functools.cache
def alone(device: torch.device) -> frozenset[tuple[int, ...]]:
    """What `holders` says of a gradient there that nothing but the backward pass holds, in this Python and PyTorch.

    Measured once, so never where it is `watched`.
    """
    found: set[tuple[int, ...]] = set()
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        for view in (False, True):
            y, _ = _Probe.apply(torch.ones(2, device=device, requires_grad=True), found)
            ((y.view(2, 1) if view else y) * 2).sum().backward()
    return frozenset(found)

"""Loading checkpoints without what ``torch.optim.Optimizer`` does to them: casting states to the parameter's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from memkern.optim.common import FusedOptimizer


def name_of(group: dict[str, Any], number: int, i: int) -> str:
    """What to call a parameter in an error: its name, where the optimizer was given names."""
    names = group.get("param_names")
    return f"parameter {names[i]!r}" if names else f"parameter {i} of group {number}"


def load_state_dict(
    optimizer: FusedOptimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Call ``load`` (torch's own method) so that states keep their dtype and lie in memory as the parameter does."""
    saved: dict[str, Any] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        _check_shapes(optimizer, state_dict)
        saved.update(state_dict)

    # After the user's own pre-hooks, which may exchange the dict; before the user's own post-hooks.
    hooks = (
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(lambda _: _restore(optimizer, saved), prepend=True),
    )
    try:
        load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()


def _entries(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(name, parameter, its saved state), for every parameter that has one."""
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = [
        (name_of(group, number, i), p)
        for number, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    ]
    for key, (name, p) in zip(ids, params, strict=False):  # torch compares the lengths afterwards
        if key in state_dict["state"]:
            yield name, p, state_dict["state"][key]


def _check_shapes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for name, p, state in _entries(optimizer, state_dict):
        for key, value in state.items():
            needed = torch.Size(()) if key == "step" else p.shape
            if isinstance(value, Tensor) and value.shape != needed and not (key == "step" and value.numel() == 1):
                raise ValueError(f"state {key!r} of {name}: got shape {tuple(value.shape)}, needs {tuple(needed)}")


def _restore(optimizer: FusedOptimizer, saved: dict[str, Any]) -> None:
    optimizer.skipped_steps.copy_(torch.as_tensor(saved.get("skipped_steps", 0)))
    for _, p, state in _entries(optimizer, saved):
        own = optimizer.state[p] = {}
        for key, value in state.items():
            if key == "step":
                # torch keeps it on the CPU unless fused, and long ago as a number
                step = value if isinstance(value, Tensor) else torch.tensor(float(value))
                own[key] = step.detach().to(p.device, torch.float32, copy=True).reshape(())
            elif isinstance(value, Tensor):
                own[key] = _laid_out_like(p, value.detach())
            elif value is not None:  # old SGD checkpoints hold momentum_buffer=None
                own[key] = value


def _laid_out_like(p: Tensor, value: Tensor) -> Tensor:
    """A copy of ``value``, in its dtype, with the device of ``p`` and the strides that a state made for ``p`` has."""
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)

"""Loading checkpoints without what ``torch.optim.Optimizer`` does to them: casting states to the parameter's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkern import backends
from memkern.optim.params import Slot, slots_of

if TYPE_CHECKING:
    from memkern.optim.common import FusedOptimizer


def load_state_dict(
    optimizer: FusedOptimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Call ``load`` (torch's own method) so that states keep their dtype and lie in memory as the parameter does."""
    saved: dict[str, Any] = {}

    def remember(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        _check(optimizer, state_dict)
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
) -> Iterator[tuple[Slot, dict[str, Any], dict[str, Any]]]:
    """(parameter, its saved group, its saved state), for every parameter that has a state."""
    saved = ((group, key) for group in state_dict["param_groups"] for key in group["params"])
    for (group, key), slot in zip(saved, slots_of(optimizer.param_groups), strict=False):  # torch compares the lengths
        if key in state_dict["state"]:
            yield slot, group, state_dict["state"][key]


def _check(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> None:
    for slot, saved_group, state in _entries(optimizer, state_dict):
        group = {**optimizer.defaults, **saved_group}  # old checkpoints lack some options
        for key, value in state.items():
            needed = torch.Size(()) if key == "step" else slot.p.shape
            if isinstance(value, Tensor) and value.shape != needed and not (key == "step" and value.numel() == 1):
                raise ValueError(f"state {key!r} of {slot.name}: got shape {tuple(value.shape)}, needs {tuple(needed)}")
        needed_keys = optimizer._needed_states(group) if state.keys() - {"master"} else ()
        for key in (*needed_keys, *(("step",) if "step" in state and "step" not in needed_keys else ())):
            if key not in state:
                raise ValueError(f"state {key!r} of {slot.name}: got none, beside {sorted(state)}")
            if not _usable(key, state[key]):
                got = state[key].dtype if isinstance(state[key], Tensor) else repr(state[key])
                raise ValueError(f"state {key!r} of {slot.name}: got {got}, needs a real floating tensor")


def _usable(key: str, value: Any) -> bool:
    if key == "step":  # long ago a number
        return not value.is_complex() if isinstance(value, Tensor) else isinstance(value, (int, float))
    if value is None:
        return key == "momentum_buffer"  # in old checkpoints of SGD
    return isinstance(value, Tensor) and value.dtype in backends.DTYPES


def _restore(optimizer: FusedOptimizer, saved: dict[str, Any]) -> None:
    optimizer.skipped_steps.copy_(torch.as_tensor(saved.get("skipped_steps", 0)))
    optimizer._last_found_inf = optimizer._skips = None
    optimizer._masters_loaded = True
    for slot, _, state in _entries(optimizer, saved):
        p = slot.p
        own = optimizer.state[p] = {}
        for key, value in state.items():
            if key == "master" and not (optimizer._has_master(p) and getattr(value, "dtype", None) is torch.float32):
                continue
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

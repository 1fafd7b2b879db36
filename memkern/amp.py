"""Loss scaling for the optimizers of :mod:`memkern.optim`: one read-only pass over the gradients, no host sync."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_pre_hooks

from memkern.optim.check import on
from memkern.optim.common import FusedOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that knows memkern's optimizers; other optimizers it treats as torch's does.

    For memkern's, one pass reads the gradients and does everything: the finite check, on the unscaled
    values, and the norm for ``max_grad_norm``. torch's scaler reads and rewrites them for the check alone.
    Where the step has pre-hooks, which may change the gradients, they are read once more after those.
    Where no parameter has a gradient, :meth:`step` and :meth:`update` do nothing.

    float16 gradients cannot go through :meth:`unscale_` (as in torch: divided, they would underflow). To
    clip them, give the optimizer ``max_grad_norm``.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: backing off stops here, or where the scale is lower already. By default 2^-14, at which a loss of 1
            is still a normal fp16 number.

    Raises:
        ValueError: ``min_scale`` is not above 0 and finite.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-14,
    ) -> None:
        if not 0 < min_scale < math.inf:
            raise ValueError(f"min_scale: got {min_scale}, needs a finite number above 0")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale = min_scale

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._check_inf_per_device(optimizer)
        scale = self._scale * getattr(optimizer, "grad_scale", 1)  # a factor of the user's own, as in torch
        with torch.no_grad():
            checked = optimizer.check_gradients(scale)
        hooks = _global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks  # after which the step looks again
        optimizer._checked = None if hooks else checked
        found = {} if checked is None else {checked.found_inf.device: checked.found_inf}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.amp.GradScaler.step``. After an error the optimizer keeps nothing of the scaler's."""
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            if isinstance(optimizer, FusedOptimizer):
                optimizer._forget_scaler()
            raise

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """See ``torch.amp.GradScaler.update``. The scale does not back off below ``min_scale``."""
        if not self._enabled or self._scale is None or new_scale is not None:
            super().update(new_scale)
            return
        states = self._per_optimizer_states.values()
        stepped = any(state["stage"] is OptState.STEPPED for state in states)
        if stepped and not any(state["found_inf_per_device"] for state in states):
            self._per_optimizer_states.clear()
            return
        floor = self._scale.clamp(max=self.min_scale)
        super().update()
        self._scale.clamp_(min=floor)


class _Skips:
    """The steps that an optimizer has skipped since a scheduler is there, on the host, as far as the device has got."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        """Right after the first step that the scheduler is there for."""
        skipped, last = optimizer.skipped_steps, on(optimizer.skipped_steps.device, optimizer._last_found_inf)
        self.before = skipped.clone() if last is None else skipped - (last != 0).long()
        self.known = self.held_back = 0
        self.copy = torch.zeros((), dtype=torch.int64, pin_memory=True) if skipped.is_cuda else None
        self.arrived: torch.cuda.Event | None = None

    def count(self, skipped_steps: Tensor) -> int:
        since = skipped_steps - self.before.to(skipped_steps.device)
        if self.copy is None or not since.is_cuda:
            self.known = int(since)
        elif self.arrived is None or self.arrived.query():
            if self.arrived is not None:
                self.known = int(self.copy)
            self.copy.copy_(since, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(since.device))
        return self.known


def step_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, optimizer: FusedOptimizer, *args: Any) -> None:
    """``scheduler.step(*args)``, but once for every step the optimizer took, and not for those it skipped.

    Call it in place of ``scheduler.step()``, every time after the optimizer's step, from the first one on that the
    scheduler is there for. It does not wait for the GPU: a skip there is known a little later, and then one call is
    held back for it.

    Args:
        scheduler: any of :mod:`torch.optim.lr_scheduler`.
        optimizer: the one it belongs to, of :mod:`memkern.optim`.
        args: of ``scheduler.step``, such as the metric of ``ReduceLROnPlateau``.

    Raises:
        TypeError: ``optimizer`` is not one of :mod:`memkern.optim`.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"optimizer: got {type(optimizer).__name__}, needs an optimizer of memkern.optim")
    if optimizer._skips is None:
        optimizer._skips = WeakKeyDictionary()
    if scheduler not in optimizer._skips:
        optimizer._skips[scheduler] = _Skips(optimizer)
    skips = optimizer._skips[scheduler]
    if skips.held_back < skips.count(optimizer.skipped_steps):
        skips.held_back += 1
    else:
        scheduler.step(*args)

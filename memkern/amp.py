"""Loss scaling for the optimizers of :mod:`memkern.optim`: one read-only pass over the gradients, no host sync."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from memkern.optim.common import FusedOptimizer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` that knows memkern's optimizers; other optimizers it treats as torch's does.

    For memkern's, one pass reads the gradients and does everything: the finite check, on the unscaled
    values, and the norm for ``max_grad_norm``. torch's scaler reads and rewrites them for the check alone.
    Where no parameter has a gradient, :meth:`step` and :meth:`update` do nothing.

    float16 gradients cannot go through :meth:`unscale_` (as in torch: divided, they would underflow). To
    clip them, give the optimizer ``max_grad_norm``.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale: backing off stops here. By default 2^-14, at which a loss of 1 is still a normal fp16 number.

    Raises:
        ValueError: ``min_scale`` is not above 0.
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
        if not min_scale > 0:
            raise ValueError(f"min_scale: got {min_scale}, needs a number above 0")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.min_scale = min_scale

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        if not isinstance(optimizer, FusedOptimizer):
            return super()._check_inf_per_device(optimizer)
        scale = self._scale * getattr(optimizer, "grad_scale", 1)  # a factor of the user's own, as in torch
        with torch.no_grad():
            optimizer._checked = optimizer.check_gradients(scale)
        found = (
            {} if optimizer._checked is None else {optimizer._checked.found_inf.device: optimizer._checked.found_inf}
        )
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.amp.GradScaler.step``. After an error the optimizer keeps nothing of the scaler's."""
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            if isinstance(optimizer, FusedOptimizer):
                optimizer._checked = None
                optimizer.__dict__.pop("grad_scale", None)
                optimizer.__dict__.pop("found_inf", None)
            raise

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """See ``torch.amp.GradScaler.update``. The scale does not back off below ``min_scale``."""
        states = self._per_optimizer_states.values() if self._enabled else ()
        stepped = any(state["stage"] is OptState.STEPPED for state in states)
        if new_scale is None and stepped and not any(state["found_inf_per_device"] for state in states):
            self._per_optimizer_states.clear()
            return
        super().update(new_scale)
        if self._enabled and new_scale is None:
            self._scale.clamp_(min=self.min_scale)


class _Skips:
    """An optimizer's skipped steps, on the host, as far as the device has got; and what schedulers know of them."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.known = self.before = optimizer._skipped_before
        self.arrived: torch.cuda.Event | None = None
        on_gpu = optimizer.skipped_steps.device.type == "cuda"
        self.copy = torch.zeros((), dtype=torch.int64, pin_memory=True) if on_gpu else None
        self.held_back: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # calls, of each scheduler

    def count(self, skipped_steps: Tensor) -> int:
        """Since the optimizer was made or loaded."""
        if self.copy is None:
            self.known = int(skipped_steps)
        elif self.arrived is None or self.arrived.query():
            if self.arrived is not None:
                self.known = int(self.copy)
            self.copy.copy_(skipped_steps, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(skipped_steps.device))
        return self.known - self.before


def step_scheduler(scheduler: torch.optim.lr_scheduler.LRScheduler, optimizer: FusedOptimizer) -> None:
    """``scheduler.step()``, but once for every step the optimizer took, and not for those it skipped.

    Call it in place of ``scheduler.step()``, every time after the optimizer's step, from the first one on after
    the optimizer was made or loaded. It does not wait for the GPU: a skip there is known a little later, and then
    one call is held back for it.

    Raises:
        TypeError: ``optimizer`` is not one of :mod:`memkern.optim`.
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(f"optimizer: got {type(optimizer).__name__}, needs an optimizer of memkern.optim")
    if optimizer._skips is None:
        optimizer._skips = _Skips(optimizer)
    skips = optimizer._skips
    held_back = skips.held_back.get(scheduler, 0)
    if held_back < skips.count(optimizer.skipped_steps):
        skips.held_back[scheduler] = held_back + 1
    else:
        scheduler.step()

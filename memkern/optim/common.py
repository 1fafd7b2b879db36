"""What all the optimizers share: arguments, state, and the protocol of ``torch.amp.GradScaler``.

The scaler calls ``step`` whether or not a gradient overflowed, with two attributes set: ``grad_scale``, by
which the gradients are still to be divided (None where ``unscale_`` has done it), and ``found_inf``, not 0
where the step must be skipped. Both stay on the device: so do the decision to skip, the step counters and
the clip factor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memkern import backends, ops
from memkern.optim.check import Check, check, on
from memkern.optim.params import Slot, check_gradient, check_parameter, check_state, local, overlaps, slots_of
from memkern.optim.ranges import check_lr
from memkern.optim.state import load_state_dict


@dataclass
class Batch:
    """The tensors of one call of a step op, in lists of one length (or empty)."""

    backend: str
    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=list)  # a list for each name of state_names
    masters: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)  # of what autograd may have saved: as the user has them


class FusedOptimizer(torch.optim.Optimizer):
    """The base class. Its arguments, after those of each optimizer's own:

    Args:
        max_grad_norm: clip the gradients, after unscaling, to this L2 norm over all of them, in the way of
            ``torch.nn.utils.clip_grad_norm_``; a step with a gradient that is not finite is then skipped,
            with a scaler or without. ``math.inf`` only checks.
        master_weights: ``torch.float32`` keeps an fp32 copy of every float16 and bfloat16 parameter in the
            state, updates that, and rounds it to the parameter. Made from the parameter at its first step:
            load weights before that, or with a checkpoint (see :meth:`load_state_dict`).
        write_unscaled_grads: leave gradients divided by the loss scale in ``.grad``, as torch's fused
            optimizers do. By default they stay as backward left them.

    These three hold for all groups; a group cannot have its own.

    Attributes:
        skipped_steps: int64 scalar on the first parameter's device: how many steps found_inf made a skip, those
            before a checkpoint included. ``state_dict()`` keeps it, beside torch's two entries, where torch ignores
            it; ``torch.distributed.checkpoint`` does not.
        grad_norm: fp32 scalar: the norm of the last step's unscaled gradients before clipping; None
            where that step had neither ``max_grad_norm`` nor a loss scale to divide by.
        grad_scale: not there unless a scaler or the user sets it: what the gradients are to be divided by in the next
            step, beside the scaler's own scale, which takes it away after that step.
    """

    _step_supports_amp_scaling = True
    _last_found_inf: Tensor | None = None  # of the last step
    _skips: Any = None  # of memkern.amp.step_scheduler
    _masters_loaded = False  # and not yet compared with the parameters

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        max_grad_norm: float | None,
        master_weights: torch.dtype | None,
        write_unscaled_grads: bool,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm: got {max_grad_norm}, needs None or a number above 0")
        if master_weights not in (None, torch.float32):
            raise ValueError(f"master_weights: got {master_weights}, needs None or torch.float32")
        if defaults.get("foreach") and defaults.get("fused"):
            raise RuntimeError("foreach: got True with fused=True, needs one of them at most")
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.write_unscaled_grads = write_unscaled_grads
        self.grad_norm: Tensor | None = None
        self._checked: Check | None = None  # by memkern.amp.GradScaler, right before the step
        super().__init__(params, defaults)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=self._first_device())

    # ---- For each optimizer to say

    def _check_group(self, group: dict[str, Any], new: bool) -> None:
        """Raise ValueError for a value out of range, of a ``new`` group or at a step. The learning rate was checked."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that have the parameter's shape."""
        raise NotImplementedError

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return True

    def _needed_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that a checkpoint has to have, where it has any."""
        return (*self._state_names(group), *(("step",) if self._counts_steps(group) else ()))

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        """Call the step op; ``on_device`` goes between its lists and its own numbers."""
        raise NotImplementedError

    # ---- Parameters

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``.

        Raises:
            TypeError: a parameter that is not real and floating.
            ValueError: a parameter whose elements share memory, a value out of range, or an argument of the optimizer's
                that a group cannot have for itself.
        """
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name in ("max_grad_norm", "master_weights", "write_unscaled_grads"):
                if name in group:
                    raise ValueError(f"{name}: got {group[name]} in a group, needs to be an argument of the optimizer")
            if group.get("differentiable"):
                raise ValueError("differentiable: got True, needs False: the step is not differentiable")
            check_lr(group, new=True)
            self._check_group(group, new=True)
            for i, p in enumerate(group["params"]):
                check_parameter(Slot(group, before, i, p))
        except Exception:
            del self.param_groups[before:]
            raise

    def _with_gradients(self) -> list[Slot]:
        """The parameters that have a gradient, after all of them have been looked at."""
        slots = [slot for slot in slots_of(self.param_groups) if slot.p.grad is not None]
        for slot in slots:
            check_parameter(slot)
            check_gradient(slot)
        return slots

    def _missing_states(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
        """What ``state`` lacks, made. States are fp32 also where parameters are 16-bit."""
        made = {}
        if "master" not in state and self._has_master(p):
            made["master"] = p.detach().to(torch.float32, copy=True)
        if "step" not in state and self._counts_steps(group):
            made["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for name in self._state_names(group):
            if name not in state:
                dtype = torch.promote_types(p.dtype, torch.float32)
                made[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        return made

    def _first_device(self) -> torch.device | None:
        return next((slot.p.device for slot in slots_of(self.param_groups) if not slot.p.is_meta), None)

    def _has_master(self, p: Tensor) -> bool:
        return self.master_weights is not None and p.dtype.itemsize == 2

    # ---- The step

    def check_gradients(self, grad_scale: Tensor | None) -> Check | None:
        """Read every gradient once: finite check, norm and clip factor. None where no parameter has a gradient."""
        grads = [slot.p.grad for slot in self._with_gradients()]
        max_norm = math.inf if self.max_grad_norm is None else float(self.max_grad_norm)
        return check(grads, grad_scale, max_norm) if grads else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or none where ``found_inf`` says so. What is raised is raised before anything is written.

        Args:
            closure: computes the loss anew, with gradients; not with a scaler.

        Returns:
            What the closure returns, else None.

        Raises:
            RuntimeError: a closure with a scaler.
            TypeError: a gradient that is sparse, not real and floating, or on another device than its parameter.
            ValueError: a gradient or a state that does not fit its parameter, a parameter whose elements share memory
                (a gradient too, with ``write_unscaled_grads``), or a group's value out of range.
        """
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        checked, self._checked = self._checked, None
        try:
            loss = None
            if closure is not None:
                if found_inf is not None:
                    raise RuntimeError("closure: got one in a step under a GradScaler, needs None")
                with torch.enable_grad():
                    loss = closure()
            self._step(_scalar(grad_scale), _scalar(found_inf), checked)
            return loss
        except BaseException:
            self._forget_scaler()
            raise

    def _forget_scaler(self) -> None:
        """Torch's scaler takes back what it set only after a step that went well; a later one would use it again."""
        self._checked = None
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)

    def _step(self, grad_scale: Tensor | None, found_inf: Tensor | None, checked: Check | None) -> None:
        if checked is None and (grad_scale is not None or self.max_grad_norm is not None):
            checked = self.check_gradients(grad_scale)
            if checked is not None and found_inf is not None:
                found_inf = checked.found_inf + on(checked.found_inf.device, found_inf)
        if checked is not None and found_inf is None:
            found_inf = checked.found_inf
        clip = checked.clip if checked is not None and self.max_grad_norm is not None else None
        for group in self.param_groups:
            check_lr(group, new=False)
            self._check_group(group, new=False)
        work, copies = self._batches(self.write_unscaled_grads and grad_scale is not None)

        # Up to here nothing of the user's has been written.
        self.grad_norm = None if checked is None else checked.norm
        if self._masters_loaded:
            self._settle_masters()
        self._advance([batch for _, batch in work], found_inf)
        for group, batch in work:
            lr_tensor, lr = (group["lr"], 0.0) if isinstance(group["lr"], Tensor) else (None, float(group["lr"]))
            scalars = (on(batch.device, value) for value in (lr_tensor, grad_scale, clip, found_inf))
            self._update(group, batch, (*scalars, lr))
            torch.autograd.graph.increment_version(batch.written)  # which the ops, without autograd, leave to us
        for target, copy in copies:
            target.copy_(copy)

    def _batches(self, write_grads: bool) -> tuple[list[tuple[dict[str, Any], Batch]], list[tuple[Tensor, Tensor]]]:
        """The tensors, by group and op call; and stand-ins with the original each is to be copied back to.

        The ops walk parameter, gradient and states through memory in step, so a parameter with gaps gets a dense
        stand-in, and a gradient in another order of dimensions one in the parameter's.
        """
        batches: dict[Any, tuple[dict[str, Any], Batch]] = {}
        copies, made = [], []
        choices: dict[Any, str] = {}
        for slot in self._with_gradients():
            group, p = slot.group, slot.p
            state = self.state.get(p, {})
            if missing := self._missing_states(group, p, state):
                state = {**state, **missing}
                made.append((p, missing))
            param, grad = local(p), local(p.grad)
            if grad.shape != param.shape:  # data exchanged since backward, or a DTensor split in another way
                raise ValueError(f"gradient of {slot.name}: got shape {tuple(grad.shape)}, needs {tuple(param.shape)}")
            kind = param.device, param.dtype
            if kind not in choices:
                choices[kind] = backends.choose(param)
            key = id(group), param.device, choices[kind], "master" in state
            if key not in batches:
                batches[key] = group, Batch(choices[kind], param.device, states=[[] for _ in self._state_names(group)])
            batch = batches[key][1]
            batch.written += [p, p.grad] if write_grads else [p]
            if not ops.is_dense(param):
                dense = torch.empty_like(param).copy_(param)
                copies.append((param, dense))
                param = dense
            if not ops.same_order(grad, param):
                if write_grads and overlaps(grad):
                    raise ValueError(
                        f"gradient of {slot.name}: got strides {grad.stride()}, needs elements that do not share "
                        "memory with write_unscaled_grads"
                    )
                ordered = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
                if write_grads:
                    copies.append((grad, ordered))
                grad = ordered
            batch.params.append(param)
            batch.grads.append(grad)
            for tensors, name in zip(batch.states, self._state_names(group), strict=True):
                tensors.append(check_state(slot, name, state[name], param))
            if "master" in state:
                batch.masters.append(check_state(slot, "master", state["master"], param))
            if self._counts_steps(group):
                batch.steps.append(check_state(slot, "step", state["step"], param))
        for p, missing in made:
            self.state[p].update(missing)
        return list(batches.values()), copies

    def _settle_masters(self) -> None:
        """A loaded master stays where it rounds to the parameter; elsewhere the parameter was loaded from elsewhere."""
        for slot in slots_of(self.param_groups):
            if "master" in self.state.get(slot.p, {}):
                param, master = local(slot.p), local(self.state[slot.p]["master"])
                if param.shape == master.shape and param.device == master.device:  # else its own step will complain
                    master.copy_(torch.where(master.to(param.dtype) == param, master, param))
        self._masters_loaded = False

    def _advance(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        """Count the step, for every parameter in it, or the skip."""
        self._last_found_inf = found_inf if batches else None
        if not batches:
            return
        first = self._first_device()
        if self.skipped_steps.device != first:  # the model was moved
            self.skipped_steps = self.skipped_steps.to(first)
        steps = defaultdict(list)
        for batch in batches:
            steps[batch.device].extend(batch.steps)
        if found_inf is not None:
            steps[first] += []
        for device, tensors in steps.items():
            found = on(device, found_inf)
            skipped = self.skipped_steps if found is not None and device == first else None
            if tensors or skipped is not None:
                ops.op(backends.choose(tensors[0] if tensors else found), "advance")(tensors, skipped, found)

    # ---- Checkpoints and copies

    def __getstate__(self) -> dict[str, Any]:
        own = ["max_grad_norm", "master_weights", "write_unscaled_grads"]
        own += ["grad_norm", "_checked", "skipped_steps", "_masters_loaded"]
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # old checkpoints lack some
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """See ``torch.optim.Optimizer``."""
        return {**super().state_dict(), "skipped_steps": self.skipped_steps}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of torch's of the same name. States keep the dtype they were saved in.

        ``skipped_steps`` becomes what the checkpoint has, 0 with torch's.

        ``master_weights`` stays what the constructor was given: without it masters in the checkpoint are dropped, and
        so are those that torch's optimizers have rounded. The step that follows takes a master where it rounds to
        the parameter, and the parameter where it does not: weights may be loaded before or after.

        Raises:
            ValueError: a state is missing (the checkpoint is of another kind of optimizer), does not have its
                parameter's shape or is not real and floating, or torch's own reasons. Nothing is loaded then.
        """
        load_state_dict(self, super().load_state_dict, state_dict)


def _scalar(value: Tensor | float | None) -> Tensor | None:
    """``grad_scale`` or ``found_inf`` as a tensor: a user may set a number, and with nothing checked found_inf is 0."""
    return value if value is None or isinstance(value, Tensor) else torch.tensor(float(value))

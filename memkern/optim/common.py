"""What all the optimizers share: arguments, state, and the protocol of ``torch.amp.GradScaler``.

The scaler calls ``step`` whether or not a gradient overflowed, with two attributes set: ``grad_scale``, by
which the gradients are still to be divided (None where ``unscale_`` has done it), and ``found_inf``, not 0
where the step must be skipped. Both stay on the device: so do the decision to skip, the step counters and
the clip factor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memkern import backends, ops
from memkern.optim.check import Check, check, local, on
from memkern.optim.state import load_state_dict, name_of


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
            load weights before, not after.
        write_unscaled_grads: leave gradients divided by the loss scale in ``.grad``, as torch's fused
            optimizers do. By default they stay as backward left them.

    Attributes:
        skipped_steps: int64 scalar on the first parameter's device: how many steps found_inf made a skip, those
            before a checkpoint included. In ``state_dict()`` beside torch's two entries, where torch ignores it.
        grad_norm: fp32 scalar: the norm of the last step's unscaled gradients before clipping; None
            before a step that had ``max_grad_norm`` or a loss scale to divide by.
    """

    _step_supports_amp_scaling = True
    _skips: Any = None  # of memkern.amp.step_scheduler

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
        if defaults.get("differentiable"):
            raise ValueError("differentiable: got True, needs False: the step is not differentiable")
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.write_unscaled_grads = write_unscaled_grads
        self.grad_norm: Tensor | None = None
        self._checked: Check | None = None  # by memkern.amp.GradScaler, ahead of the step
        super().__init__(params, defaults)
        first = next((p for group in self.param_groups for p in group["params"]), None)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=None if first is None else first.device)
        self._skipped_before = 0  # what a loaded schedule has been through already

    # ---- For each optimizer to say

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a value out of range."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that have the parameter's shape."""
        raise NotImplementedError

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        return True

    def _update(self, group: dict[str, Any], batch: Batch, on_device: tuple[Any, ...]) -> None:
        """Call the step op; ``on_device`` goes between its lists and its own numbers."""
        raise NotImplementedError

    # ---- Parameters

    @torch._disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``. Raises TypeError for a parameter that is not real and floating."""
        before = len(self.param_groups)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for i, p in enumerate(group["params"]):
                if p.dtype not in backends.DTYPES or p.layout is not torch.strided:
                    raise TypeError(
                        f"{name_of(group, before, i)}: got {p.dtype}, {p.layout}, "
                        "needs a dense float16, bfloat16, float32 or float64 tensor"
                    )
        except Exception:
            del self.param_groups[before:]
            raise

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Every parameter that has a gradient, after all of them have been looked at."""
        found = []
        for number, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                grad = p.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided or grad.dtype not in backends.DTYPES or grad.device != p.device:
                    raise TypeError(
                        f"gradient of {name_of(group, number, i)}: got {grad.dtype}, {grad.layout} on {grad.device}, "
                        f"needs a dense float16, bfloat16, float32 or float64 tensor on {p.device}"
                    )
                found.append((group, p))
        return iter(found)

    def _state_of(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of ``p``, what is missing made. States are fp32 also where parameters are 16-bit."""
        state = self.state[p]
        dtype = torch.promote_types(p.dtype, torch.float32)
        if self.master_weights is not None and p.dtype.itemsize == 2 and "master" not in state:
            state["master"] = p.detach().to(dtype, copy=True)
        if self._counts_steps(group) and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for name in self._state_names(group):
            if name not in state:
                state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        return state

    # ---- The step

    def check_gradients(self, grad_scale: Tensor | None) -> Check | None:
        """Read every gradient once: finite check, norm and clip factor. None where no parameter has a gradient."""
        grads = [p.grad for _, p in self._with_gradients()]
        max_norm = math.inf if self.max_grad_norm is None else float(self.max_grad_norm)
        return check(grads, grad_scale, max_norm) if grads else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or none where ``found_inf`` says so.

        Args:
            closure: computes the loss anew, with gradients; not with a scaler.

        Returns:
            What the closure returns, else None.

        Raises:
            RuntimeError: a closure with a scaler.
            TypeError: a gradient that is sparse, not real and floating, or on another device than its parameter.
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
            # The scaler takes its attributes back only after a step that went well; a later one would multiply
            # the scale in twice.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    def _step(self, grad_scale: Tensor | None, found_inf: Tensor | None, checked: Check | None) -> None:
        if checked is None and (grad_scale is not None or self.max_grad_norm is not None):
            checked = self.check_gradients(grad_scale)
            if checked is not None and found_inf is not None:
                checked = checked._replace(found_inf=checked.found_inf + found_inf.to(checked.found_inf))
        if checked is not None:
            found_inf, self.grad_norm = checked.found_inf, checked.norm
        clip = checked.clip if checked is not None and self.max_grad_norm is not None else None

        work, copies = self._batches()
        self._advance([batch for _, batch in work], found_inf)
        for group, batch in work:
            lr_tensor, lr = (group["lr"], 0.0) if isinstance(group["lr"], Tensor) else (None, float(group["lr"]))
            scalars = (on(batch.device, value) for value in (lr_tensor, grad_scale, clip, found_inf))
            self._update(group, batch, (*scalars, lr))
            torch.autograd.graph.increment_version(batch.written)  # which the ops, without autograd, leave to us
        for target, copy in copies:
            target.copy_(copy)

    def _batches(self) -> tuple[list[tuple[dict[str, Any], Batch]], list[tuple[Tensor, Tensor]]]:
        """The tensors, by group and op call; and stand-ins with the original each is to be copied back to.

        The ops walk parameter, gradient and states through memory in step, so a parameter with gaps gets a dense
        stand-in, and a gradient in another order of dimensions one in the parameter's.
        """
        batches: dict[Any, tuple[dict[str, Any], Batch]] = {}
        copies = []
        choices: dict[Any, str] = {}
        for group, p in self._with_gradients():
            state = self._state_of(group, p)
            param, grad = local(p), local(p.grad)
            kind = param.device, param.dtype
            if kind not in choices:
                choices[kind] = backends.choose(param)
            key = id(group), param.device, choices[kind], "master" in state
            if key not in batches:
                batches[key] = group, Batch(choices[kind], param.device, states=[[] for _ in self._state_names(group)])
            batch = batches[key][1]
            batch.written += [p, p.grad] if self.write_unscaled_grads else [p]
            if not is_dense(param):
                dense = torch.empty_like(param).copy_(param)
                copies.append((param, dense))
                param = dense
            if not ops.same_order(grad, param):
                ordered = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
                if self.write_unscaled_grads:
                    copies.append((grad, ordered))
                grad = ordered
            batch.params.append(param)
            batch.grads.append(grad)
            for tensors, name in zip(batch.states, self._state_names(group), strict=True):
                tensors.append(self._beside(p, param, name))
            if "master" in state:
                batch.masters.append(self._beside(p, param, "master"))
            if self._counts_steps(group):
                batch.steps.append(state["step"])
        return list(batches.values()), copies

    def _beside(self, p: Tensor, param: Tensor, key: str) -> Tensor:
        """That state of ``p``, which must lie in memory as ``param`` does."""
        state = local(self.state[p][key])
        if state.shape != param.shape or state.device != param.device or not ops.same_order(state, param):
            groups = enumerate(self.param_groups)
            name = next(name_of(g, number, i) for number, g in groups for i, q in enumerate(g["params"]) if q is p)
            raise ValueError(
                f"state {key!r} of {name}: got shape {tuple(state.shape)}, strides {state.stride()} on {state.device}, "
                f"needs {tuple(param.shape)}, {param.stride()} on {param.device}"
            )
        return state

    def _advance(self, batches: list[Batch], found_inf: Tensor | None) -> None:
        """Count the step, for every parameter in it, or the skip."""
        steps = defaultdict(list)
        for batch in batches:
            steps[batch.device].extend(batch.steps)
        if batches and found_inf is not None:
            steps[self.skipped_steps.device] += []
        for device, tensors in steps.items():
            skipped = self.skipped_steps if found_inf is not None and device == self.skipped_steps.device else None
            if tensors or skipped is not None:
                backend = backends.choose(tensors[0] if tensors else found_inf.to(device))
                ops.op(backend, "advance")(tensors, skipped, on(device, found_inf))

    # ---- Checkpoints and copies

    def __getstate__(self) -> dict[str, Any]:
        own = ("max_grad_norm", "master_weights", "write_unscaled_grads", "grad_norm", "_checked", "skipped_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # old checkpoints lack some
            for name, default in self.defaults.items():
                group.setdefault(name, default)
        if "skipped_steps" in state:  # a copy, not load_state_dict
            self._count_skips_from_here()

    def _count_skips_from_here(self) -> None:
        self._skipped_before, self._skips = int(self.skipped_steps), None

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """See ``torch.optim.Optimizer``."""
        return {**super().state_dict(), "skipped_steps": self.skipped_steps}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of torch's of the same name. States keep the dtype they were saved in.

        ``skipped_steps`` becomes what the checkpoint has, 0 with torch's.

        Raises:
            ValueError: a state's shape is not its parameter's, or torch's own reasons. Nothing is loaded then.
        """
        load_state_dict(self, super().load_state_dict, state_dict)
        self._count_skips_from_here()


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    return x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x)


def _scalar(value: Tensor | float | None) -> Tensor | None:
    """``grad_scale`` or ``found_inf`` as a tensor: a user may set a number, and with nothing checked found_inf is 0."""
    return value if value is None or isinstance(value, Tensor) else torch.tensor(float(value))

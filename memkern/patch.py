"""Put the fused layers into a model that exists, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import Module

from memkern import nn
from memkern.functional.common import AUTOCAST, one_of

# A fused layer that keeps its state as PyTorch's does joins with a line here.
FUSED: dict[type[Module], type[Module]] = {
    torch.nn.GELU: nn.GELU,
    torch.nn.LayerNorm: nn.LayerNorm,
    torch.nn.RMSNorm: nn.RMSNorm,
    torch.nn.Softmax: nn.Softmax,
    torch.nn.LogSoftmax: nn.LogSoftmax,
    torch.nn.CrossEntropyLoss: nn.CrossEntropyLoss,
}
if hasattr(torch.nn, "LinearCrossEntropyLoss"):
    FUSED[torch.nn.LinearCrossEntropyLoss] = nn.LinearCrossEntropyLoss
_TORCHS = {fused: torchs for torchs, fused in FUSED.items()}
_MARK = "_patched_by_memkern"  # in the __dict__ of a patched module: the names of the options set on it


@dataclass
class Patch:
    """What :func:`patch` did. As a context manager, it undoes that at the end of the block.

    Attributes:
        replaced: name in the model of each layer that is fused now: its class before.
        left: name of each layer that is not, though it is one of the layers above or a subclass: why.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _fused: list[Module] = field(default_factory=list, repr=False)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._fused:
            _restore(module)

    def __str__(self) -> str:
        lines = [f"replaced {name or '(the model)'}: {before}" for name, before in self.replaced.items()]
        lines += [f"left {name or '(the model)'}: {why}" for name, why in self.left.items()]
        return "\n".join(lines or ["nothing to replace"])


def patch(model: Module, *, autocast: str = "keep", memory_efficient: bool = False) -> Patch:
    """Fuse the ``torch.nn`` layers of this model, in place; no other model changes.

    ``GELU``, ``LayerNorm``, ``RMSNorm``, ``Softmax``, ``LogSoftmax``, ``CrossEntropyLoss`` and
    ``LinearCrossEntropyLoss`` become memkern's by a change of their class: the modules, their parameters, buffers,
    hooks, flags and names stay the very same, so optimizers and checkpoints go on as before.

    Args:
        model: the model, or one layer.
        autocast: for the norms and the softmax layers, see :func:`memkern.functional.layer_norm`.
        memory_efficient: for the norms, see there.

    Returns:
        A report, which prints as a list. In ``with memkern.patch(model):`` the layers are fused inside the block.

    Raises:
        TypeError: ``model`` is not a Module.
        ValueError: another ``autocast``.
    """
    one_of("autocast", autocast, AUTOCAST)
    options = {"autocast": autocast, "memory_efficient": memory_efficient}
    report = Patch()
    for name, module in _named(model):
        if not isinstance(module, tuple(FUSED)):
            continue
        why = _why_not(module)
        if why is not None:
            report.left[name] = why
            continue
        fused = FUSED[type(module)]
        report.replaced[name] = f"torch.nn.{type(module).__name__}"
        report._fused.append(module)
        own = {option: value for option, value in options.items() if hasattr(fused, option)}
        module.__dict__.update({**own, _MARK: tuple(own)})
        module.__class__ = fused
    return report


def unpatch(model: Module) -> None:
    """Give every layer that :func:`patch` fused in this model its ``torch.nn`` class back.

    Layers that were made as memkern's stay so, and so do those whose class something else has changed since.

    Raises:
        TypeError: ``model`` is not a Module.
    """
    for _, module in _named(model):
        _restore(module)


def _named(model: Module) -> Iterator[tuple[str, Module]]:
    if not isinstance(model, Module):
        raise TypeError(f"model: got {type(model).__name__}, needs a torch.nn.Module")
    return model.named_modules()


def _why_not(module: Module) -> str | None:
    """Why a layer stays as it is, or None."""
    kind = type(module)
    if isinstance(module, tuple(_TORCHS)):
        return "is memkern's already"
    if kind not in FUSED:
        return f"its class, {kind.__module__}.{kind.__qualname__}, is a subclass and may compute something else"
    if "forward" in module.__dict__:
        return "its forward was replaced on the module itself"
    return None


def _restore(module: Module) -> None:
    if _MARK in module.__dict__ and type(module) in _TORCHS:
        for attribute in (*module.__dict__[_MARK], _MARK):
            del module.__dict__[attribute]
        module.__class__ = _TORCHS[type(module)]

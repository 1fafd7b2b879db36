"""Where the bytes of training go: what a forward pass keeps for backward, and what an optimizer keeps.

Bytes are those of whole storages, each counted once however many tensors share it: a view keeps all of
the memory that it looks into alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Saved:
    """What :func:`saved_for_backward` found; filled in when its block ends."""

    bytes: int = 0
    storages: int = 0


@contextlib.contextmanager
def saved_for_backward(exclude: Iterable[Tensor] = ()) -> Iterator[Saved]:
    """Measure what autograd keeps for backward from the operations inside the block.

    Wrap a forward pass. Values and gradients do not change, but everything saved stays in memory until
    the block ends, so do not measure peak memory inside it. ::

        with saved_for_backward(exclude=model.parameters()) as saved:
            loss = model(x)
        print(saved.bytes)

    Args:
        exclude: tensors whose storage is in memory anyway, such as ``model.parameters()``. Copies of
            them (a weight cast by autocast) count.

    Yields:
        A :class:`Saved`: ``bytes``, and ``storages``, how many separate pieces of memory they are in.

    Raises:
        TypeError: ``exclude`` holds something that is not a tensor.
    """
    excluded = _storages(exclude)
    # Keeping the storages, not only their ids, so that no id is used a second time inside the block.
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        kept.update(_storages([x]))
        return x.detach()  # returning x itself would make a reference cycle

    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved
    sizes = [storage.nbytes() for key, storage in kept.items() if key not in excluded]
    saved.bytes, saved.storages = sum(sizes), len(sizes)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state. PyTorch's optimizers have none before their first step.

    Raises:
        TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: got {type(optimizer).__name__}, needs a torch.optim.Optimizer")
    tensors = _tensors_in(list(optimizer.state.values()))
    return sum(storage.nbytes() for storage in _storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages behind tensors, each once, by id (PyTorch gives one Python object per storage)."""
    storages = {}
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"exclude: got an item of type {type(tensor).__name__}, needs tensors")
        storage = tensor.untyped_storage()
        storages[id(storage)] = storage
    return storages


def _tensors_in(state: object) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _tensors_in(item)

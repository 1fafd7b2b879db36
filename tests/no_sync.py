"""Catches whatever would make the host wait for a GPU, also where the tensors happen to be on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _NoSync(TorchDispatchMode):
    """For what is dispatched. A copy to the CPU that is waited for, and is no cast, stands for one from a GPU."""

    SYNCHRONISING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        name = function.overloadpacket.__name__
        reads = name in self.SYNCHRONISING or (name == "index" and arguments[1][0].dtype == torch.bool)
        if name == "_to_copy":
            source, device = arguments[0], keywords.get("device")
            only_copies = keywords.get("dtype") in (None, source.dtype) and not keywords.get("non_blocking")
            reads = device is not None and device.type == "cpu" and (source.is_cuda or only_copies)
        if name == "copy_":
            target, source, *non_blocking = arguments
            waits = not any(non_blocking) and not keywords.get("non_blocking")
            reads = target.device != source.device and target.device.type == "cpu" and waits
        if reads:
            raise AssertionError(f"host sync: {name}")
        return function(*arguments, **keywords)


def _forbid_reading(patch: pytest.MonkeyPatch) -> None:
    """For what runs below the dispatch mode (the reference ops)."""
    for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__"):

        def forbidden(*arguments, name=name, **keywords):
            raise AssertionError(f"host sync: {name}")

        patch.setattr(Tensor, name, forbidden)


@contextlib.contextmanager
def no_sync(device: str) -> Iterator[None]:
    """Raises AssertionError, "host sync", inside the block; on a GPU torch's own watch is set too."""
    with pytest.MonkeyPatch.context() as patch, _NoSync():
        _forbid_reading(patch)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

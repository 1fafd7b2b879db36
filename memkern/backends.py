"""Which implementation of an op runs, why, and how to choose another.

The choice is made per call from the tensor's device and dtype: a CUDA tensor takes ``cuda``, else ``triton``,
else ``reference``; a CPU tensor ``cpu``, else ``reference``; other devices (ROCm counts as CUDA in
PyTorch) ``triton`` where Triton has a driver for them, else ``reference``. ``with backend("triton"):``
or the environment variable ``MEMKERN_BACKEND`` overrides it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from memkern import ops, reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HERE = Path(__file__).parent


def _load_native(name: str) -> None:
    path = _HERE / f"_{name}.so"
    if not path.exists():
        raise ImportError(f"{path.name} was not built (see: memkern info)")
    ops.define(name)
    torch.ops.load_library(path)


def _load_cuda() -> None:
    if torch.version.cuda is None:
        raise ImportError(f"this PyTorch ({torch.__version__}) is built without CUDA")
    _load_native("cuda")


def _load_triton() -> None:
    if not (interpreting() or torch.cuda.is_available() or torch.xpu.is_available()):
        raise ImportError("no GPU that Triton drives, and TRITON_INTERPRET is not set")
    importlib.import_module("memkern.triton").register()


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


_LOADERS: dict[str, Callable[[], None]] = {
    "cuda": _load_cuda,
    "triton": _load_triton,
    "cpu": lambda: _load_native("cpu"),
    "reference": reference.register,
}
_DEVICES = {"cuda": ("cuda",), "triton": ("cuda", "xpu"), "cpu": ("cpu",)}
# Triton has no fp64 erfc or exp without libdevice, which its interpreter lacks.
_NOT_SERVED = {"triton": (torch.float64,)}
_ORDER = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference"), "xpu": ("triton", "reference")}

_loaded: set[str] = set()
# Chosen by hand: a stack, the last one counts. A plain list, since Dynamo before 2.14 cannot trace a ContextVar.
_by_hand = [name for name in (os.environ.get("MEMKERN_BACKEND"),) if name]


def names() -> tuple[str, ...]:
    """The names that ``backend()`` and ``MEMKERN_BACKEND`` take."""
    return tuple(_LOADERS)


def unavailable(name: str) -> str | None:
    """Why backend ``name`` cannot run here, or None. A backend that failed once is tried again."""
    if name not in _LOADERS:
        raise ValueError(f"backend: got {name!r}, needs one of {', '.join(map(repr, names()))}")
    if name not in _loaded:
        try:
            _LOADERS[name]()
        except Exception as error:  # whatever a broken installation raises: kept as the reason
            return (str(error) or repr(error)).splitlines()[0]
        _loaded.add(name)
    return None


def _mismatch(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why backend ``name`` does not serve such tensors, or None."""
    if dtype in _NOT_SERVED.get(name, ()):
        return f"it does not serve {dtype} tensors"
    devices = _DEVICES.get(name)
    if devices is None or device in devices or (name == "triton" and device == "cpu" and interpreting()):
        return None
    return f"it serves {' and '.join(devices)} tensors, not {device}"


def choose(x: Tensor) -> str:
    """The backend that serves ``x``.

    Raises:
        ValueError: ``MEMKERN_BACKEND`` names no backend.
        RuntimeError: the backend chosen by hand cannot run here or does not serve ``x``; the message says why.
    """
    device, dtype = x.device.type, x.dtype
    if not _by_hand:
        return _first_choice(device, dtype)
    by_hand = _by_hand[-1]
    if by_hand not in _loaded:  # from MEMKERN_BACKEND
        require(by_hand)
    reason = _mismatch(by_hand, device, dtype)
    if reason is not None:
        raise RuntimeError(f"backend {by_hand!r} was asked for, but {reason}")
    return by_hand


def _first_choice(device: str, dtype: torch.dtype) -> str:
    for name in _ORDER.get(device, ()):
        if name in _loaded and dtype not in _NOT_SERVED.get(name, ()):
            return name
    return "reference"


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every memkern op of this process on one backend while the block lasts.

    Args:
        name: ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: it cannot run here; the message says why. A tensor that it does not serve
            raises at the call that meets it.
    """
    require(name)
    _by_hand.append(name)
    try:
        yield
    finally:
        _by_hand.pop()


def require(name: str) -> None:
    """Raise if backend ``name`` cannot run here: RuntimeError with the reason."""
    reason = unavailable(name)
    if reason is not None:
        raise RuntimeError(f"backend {name!r} cannot run here: {reason}")


def explain(x: Tensor | torch.device | str) -> dict[str, str]:
    """For each backend, that it runs for ``x`` (a tensor; or a device, for its fp32 tensors) or why it does not."""
    if not isinstance(x, Tensor):
        device, dtype = torch.device(x).type, torch.float32
    else:
        device, dtype = x.device.type, x.dtype
    chosen = _by_hand[-1] if _by_hand else _first_choice(device, dtype)
    answer = {}
    for name in names():
        runs = "runs: chosen by hand" if _by_hand else "runs"
        could = runs if name == chosen else "could run, is not the first choice"
        answer[name] = unavailable(name) or _mismatch(name, device, dtype) or could
    return answer


def start() -> None:
    """Load what can be loaded. Called once, by ``import memkern``, which nothing here makes fail."""
    for name in names():
        unavailable(name)

"""The CUDA sources, compiled for the CPU and run there thread by thread: backend ``emulated``, for tests only.

``load()`` builds it and adds it to ``memkern.backends``. The environment variable ``MEMKERN_EMULATOR``
chooses the kind: ``plain``, ``asan`` (AddressSanitizer and UndefinedBehaviorSanitizer) or ``tsan``
(ThreadSanitizer); the latter two run only in a process started with ``environment(kind)``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from typing import Any

from memkern import backends, ops
from tests.emulator import build


def unavailable() -> str | None:
    """Why the emulator cannot be built here, or None."""
    return build.missing()


@functools.cache
def load() -> Any:
    """Build and load the emulator, once, and return its Python module (see bindings.cpp)."""
    os.environ.pop("LD_PRELOAD", None)  # the sanitizer is for this process, not for the compiler
    folder = build.build(os.environ.get("MEMKERN_EMULATOR", "plain"))
    ops.define("emulated")
    # The module needs the library of kernels, whose ops register themselves as it is loaded.
    loader = ExtensionFileLoader("memkern_emulator", str(folder / build.BINDINGS))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    module.name_kernels(_function_names(folder / build.LIBRARY))
    backends._LOADERS["emulated"] = lambda: None
    backends._DEVICES["emulated"] = ("cpu",)
    return module


def _function_names(library: os.PathLike[str]) -> dict[int, str]:
    lines = subprocess.run(["nm", "-C", library], check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = (line.split(maxsplit=2) for line in lines if not line.startswith(" "))
    return {int(address, 16): name for address, kind, name in symbols if kind in "tTwW"}


@contextlib.contextmanager
def counting() -> Iterator[list[dict[str, Any]]]:
    """Count memory traffic inside the block. The list it gives is filled at the end: one dict a launch, in order.

    Keys: ``kernel`` (with template arguments), ``grid``, ``block``, ``shared_bytes``, and under ``loaded``
    and ``stored``: ``bytes`` (summed over threads), ``warp_accesses``, ``sectors`` (of 32 bytes, touched)
    and ``sectors_needed`` (the fewest for the same bytes). Shared memory is not counted.
    """
    module = load()
    launches: list[dict[str, Any]] = []
    module.count(True)
    try:
        yield launches
    finally:
        module.count(False)
        launches += module.launches()


def bytes_moved(launches: list[dict[str, Any]], elements: int) -> dict[str, float]:
    """Bytes an element that each kernel moves in 32-byte sectors; fails where an access touches more than it needs."""
    moved: dict[str, float] = {}
    for launch in launches:
        for way in ("loaded", "stored"):
            assert launch[way]["sectors"] == launch[way]["sectors_needed"], launch
        name = launch["kernel"].split("(")[1].split("::")[-1].split("<")[0]
        sectors = launch["loaded"]["sectors"] + launch["stored"]["sectors"]
        moved[name] = moved.get(name, 0) + 32 * sectors / elements
    return moved


def environment(kind: str) -> dict[str, str]:
    """The environment for a Python process that loads kind ``asan`` or ``tsan``: their runtimes come first."""

    def runtime(name: str) -> str:
        command = ["g++", f"-print-file-name={name}.so"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return {
        **os.environ,
        "MEMKERN_EMULATOR": kind,
        "LD_PRELOAD": f"{runtime(f'lib{kind}')} {runtime('libstdc++')}",  # ASan wants libstdc++'s throw at its start
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OMP_NUM_THREADS": "1",  # PyTorch's threads synchronise where TSan does not look
    }

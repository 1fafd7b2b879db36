"""Seconds per call: wall clock on a CPU, graph replay between events on a CUDA device.

Both clocks go round a ring of calls, each with inputs of its own and holding its output until its next
turn, so that neither inputs nor outputs are still in cache when they are used again. (That also keeps
the allocator honest: every call allocates its output, as in training, the same for every variant.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

# seconds per call, and the host's share of them where the device works apart from the host
Sample = tuple[float, float | None]


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Where malloc is glibc's. Else freed memory goes back to the system now and then, and the page faults of
    getting it again, longer than the work itself, fall on whichever variant comes next.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # their numbers in malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)
    try:
        yield
    finally:
        libc.mallopt(mmap_max, 65536)  # glibc's defaults
        libc.mallopt(trim_threshold, 128 * 1024)
        libc.malloc_trim(0)


class Calls:
    """A ring of calls: the same work on different memory."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self.calls = calls
        self.held: list[Any] = [None] * len(calls)
        self.next = 0

    def __len__(self) -> int:
        return len(self.calls)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.held[self.next] = self.calls[self.next]()
            self.next = (self.next + 1) % len(self.calls)

    def seconds(self, count: int) -> float:
        """Wall-clock seconds per call, over ``count`` calls."""
        start = time.perf_counter()
        self.run(count)
        return (time.perf_counter() - start) / count


class CpuClock:
    """Wall clock. A sample is as many calls as take about ``SAMPLE`` seconds, one at least."""

    SAMPLE = 0.005
    WARM_UP = 0.1  # seconds, or one time round the ring
    SMALLEST_CACHE = 32 * 2**20  # where the system does not tell, or counts one slice of it

    def __init__(self) -> None:
        told = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
        self.cache_bytes = max(told, self.SMALLEST_CACHE)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def ready(self, calls: Calls) -> tuple[str, Callable[[], Sample]]:
        """Warm up; return the method's name and what takes one sample."""
        calls.run(1)
        once = calls.seconds(1)
        calls.run(min(len(calls), round(self.WARM_UP / once)))
        count = max(1, min(len(calls), round(self.SAMPLE / once)))
        return "wall clock", lambda: (calls.seconds(count), None)


class CudaClock:
    """Device time between two events, with work queued ahead so that the host is never waited for.

    The ring is captured in a CUDA graph and replayed. Calls that cannot be captured (they synchronise,
    say) are queued behind a sleeping kernel instead. Either way a call's time is that of its kernels and
    of the microsecond or so between one kernel and the next, which counts where tensors are small.
    Everything runs on one stream, since a gradient runs on its forward pass's stream and has to be
    captured too.
    """

    REPLAYS = 4
    QUEUED = 32  # calls in a queue: well under the 1024 launches after which the host is made to wait
    SLEEP_HZ = 2e9  # cycles in a second of torch.cuda._sleep, roughly

    def __init__(self, device: torch.device) -> None:
        self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.stream = torch.cuda.Stream(device)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def ready(self, calls: Calls) -> tuple[str, Callable[[], Sample]]:
        """Warm up and capture; return the method's name and what takes one sample."""
        calls.run(2 * len(calls))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                calls.run(len(calls))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return "events", lambda: self._queued(calls)
        return "graph", lambda: (self._replayed(graph, len(calls)), self._host(calls))

    def _replayed(self, graph: torch.cuda.CUDAGraph, calls: int) -> float:
        graph.replay()  # keeps the device busy while the timed ones are queued
        start, end = self._events()
        start.record()
        for _ in range(self.REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / (self.REPLAYS * calls)

    def _queued(self, calls: Calls) -> Sample:
        host = self._host(calls)
        start, end = self._events()
        torch.cuda._sleep(int(2 * host * self.QUEUED * self.SLEEP_HZ))
        start.record()
        calls.run(self.QUEUED)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.QUEUED, host

    def _host(self, calls: Calls) -> float:
        torch.cuda.synchronize()
        seconds = calls.seconds(self.QUEUED)
        torch.cuda.synchronize()
        return seconds

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

"""The most memory that a call holds at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(f: Callable[[], Any]) -> int:
    """Of what PyTorch allocates on the CPU during ``f``, its own temporary copies included, as the profiler sees it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        f()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # below 0 where memory is freed
        peak = max(peak, held)
    return peak

"""Compare implementations of one op family, case by case.

All variants of a case share their inputs and are sampled in turn (round robin), so that a slow moment
of the machine hits all of them. One of them is ``copy_`` of as many bytes as the case has to move: the
speed that memory itself allows.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import memkern
from benchmarks.timing import Calls, CpuClock, CudaClock, Sample

EAGER = "torch eager"
COPY = "copy_, same bytes"
ROTATION = 3  # the ring's working set, in sizes of the last-level cache
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

Function = Callable[..., Any]
Clock = CpuClock | CudaClock


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Args:
        form: the family's own distinction (GELU: ``"erf"`` or ``"tanh"``).
        shape: of the input.
        dtype: of the input.
        direction: ``"forward"``, ``"backward"`` or ``"both"``; an optimizer's is ``"step"``.
        bytes: the fewest a call has to move through memory: each input read once, each output written once.
    """

    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    direction: str
    bytes: int

    @property
    def label(self) -> str:
        shape = "x".join(_binary(size) for size in self.shape)
        return f"{self.form} {shape} {SHORT[self.dtype]} {self.direction}"


def _binary(size: int) -> str:
    """4194304 as 4M, 65536 as 64K; others in full."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if size % unit == 0 and size > 0:
            return f"{size // unit}{name}"
    return str(size)


def layer_call(case: Case, function: Function, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """The call that is timed for a layer. ``inputs``: the function's arguments, then dy, the same for every output."""
    *arguments, dy = inputs
    wanted = [argument for argument in arguments if argument.requires_grad]

    def gradients(y: Tensor | tuple[Tensor, ...], retain_graph: bool = False) -> tuple[Tensor, ...]:
        outputs = (y,) if isinstance(y, Tensor) else y
        return torch.autograd.grad(outputs, wanted, [dy] * len(outputs), retain_graph=retain_graph)

    def forward() -> Any:
        with torch.no_grad():
            return function(*arguments)

    def both() -> tuple[Any, tuple[Tensor, ...]]:
        y = function(*arguments)
        return y, gradients(y)

    if case.direction == "backward":
        y = function(*arguments)
        return lambda: gradients(y, retain_graph=True)
    return {"forward": forward, "both": both}[case.direction]


@dataclass(frozen=True)
class Family:
    """What a file of this package declares.

    Args:
        name: the file's name.
        formula: how ``Case.bytes`` is counted, in words.
        cases: ``(device type, quick)`` -> the cases.
        inputs: ``(case, device)`` -> random tensors, as ``call`` wants them.
        baseline: case -> the function in plain PyTorch; timed eager and compiled.
        fused: case -> memkern's function; timed on each backend.
        peers: other packages, by name: case -> their function (imported there; a missing one is reported).
        call: ``(case, function, inputs)`` -> the call to time.
        compiles: whether ``torch.compile`` takes the baseline.
    """

    name: str
    formula: str
    cases: Callable[[str, bool], list[Case]]
    inputs: Callable[[Case, torch.device], tuple[Tensor, ...]]
    baseline: Callable[[Case], Function]
    fused: Callable[[Case], Function]
    peers: Mapping[str, Callable[[Case], Function]] = field(default_factory=dict)
    call: Callable[[Case, Function, tuple[Tensor, ...]], Callable[[], Any]] = layer_call
    compiles: bool = True


Ring = list[tuple[Tensor, ...]]  # copies of a case's inputs


@dataclass(frozen=True)
class Variant:
    """One implementation: how to get its calls, one for each copy of the inputs, and what they run inside."""

    name: str
    calls: Callable[[Case, Ring], list[Callable[[], Any]]]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def why_not(backend: str, device: torch.device) -> str | None:
    """Why a memkern backend cannot be timed on a device, or None."""
    if backend == "triton" and memkern.backends.interpreting():
        return "backend 'triton' runs in Triton's interpreter here (TRITON_INTERPRET), which is not made for speed"
    try:
        with memkern.backend(backend):
            memkern.backends.choose(torch.empty(0, device=device))
    except RuntimeError as error:
        return str(error)
    return None


def compiled(function: Function) -> Function:
    # The backward pass alone is timed over and over on one saved graph, so its buffers are not to be given away.
    torch._functorch.config.donated_buffer = False
    torch.compiler.reset()  # else a function is quietly run eager after a few recompilations
    return torch.compile(function, fullgraph=True, dynamic=False)


def copies(case: Case, ring: Ring) -> list[Callable[[], Any]]:
    """``copy_`` of as many bytes as the case moves: half of them read, half written."""
    source = torch.randn(case.bytes // 8, device=ring[0][0].device)  # fp32
    return [partial(torch.empty_like(source).copy_, source.clone()) for _ in ring]


def variants(family: Family, device: torch.device, quick: bool) -> list[Variant]:
    """All that can run here. ``quick`` leaves out compiling, and the reference where it is not all there is."""

    def calls(function_for: Callable[[Case], Function], case: Case, ring: Ring) -> list[Callable[[], Any]]:
        function = function_for(case)
        return [family.call(case, function, inputs) for inputs in ring]

    backends = [name for name in memkern.backends.names() if why_not(name, device) is None]
    if quick and len(backends) > 1:
        backends.remove("reference")
    found = [Variant(COPY, copies), Variant(EAGER, partial(calls, family.baseline))]
    if family.compiles and not quick:
        found.append(Variant("torch.compile", partial(calls, lambda case: compiled(family.baseline(case)))))
    found += [
        Variant(f"memkern {name}", partial(calls, family.fused), partial(memkern.backend, name)) for name in backends
    ]
    return found + [Variant(name, partial(calls, function_for)) for name, function_for in family.peers.items()]


@dataclass(frozen=True)
class Effort:
    """Rounds of samples per case: as many as fit in ``seconds``, within bounds."""

    fewest: int
    most: int
    seconds: float


QUICK = Effort(fewest=3, most=10, seconds=0.2)
FULL = Effort(fewest=5, most=40, seconds=1.0)


@dataclass
class Result:
    """The samples of one variant, or the kind of error it ended in."""

    method: str = ""
    samples: list[Sample] = field(default_factory=list)
    error: str = ""

    def fail(self, what: str, error: Exception) -> None:
        """Keep the kind of error alone (its text may name folders), and print the whole."""
        self.error = type(error).__name__
        self.samples.clear()
        print(f"{what}: {self.error}: {error}", file=sys.stderr)


def ring_size(case: Case, cache_bytes: int) -> int:
    return max(2, math.ceil(ROTATION * cache_bytes / case.bytes))


def measure(
    family: Family, case: Case, variants: list[Variant], clock: Clock, device: torch.device, effort: Effort
) -> dict[str, Result]:
    """Time every variant of a case; results by variant's name.

    A variant that raises is reported and left out from there on: the rest goes on.
    """
    torch.manual_seed(0)
    results = {}
    samplers = []
    with clock.context():
        originals = family.inputs(case, device)
        ring = [
            tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in originals)
            for _ in range(ring_size(case, clock.cache_bytes))
        ]
        for variant in variants:
            result = results[variant.name] = Result()
            try:
                with variant.context():
                    result.method, sample = clock.ready(Calls(variant.calls(case, ring)))
            except Exception as error:  # a compiler or a peer may raise anything
                result.fail(f"{variant.name}, {case.label}", error)
            else:
                samplers.append((variant, result, sample))
        _sample_in_turn(case, samplers, effort)
    return results


def _sample_in_turn(case: Case, samplers: list[tuple[Variant, Result, Callable[[], Sample]]], effort: Effort) -> None:
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    for done in range(effort.most):
        if done >= effort.fewest and time.perf_counter() - start > effort.seconds:
            break
        for variant, result, sample in samplers:
            if result.error:
                continue
            try:
                with variant.context():
                    result.samples.append(sample())
            except Exception as error:  # memory may run out here, too
                result.fail(f"{variant.name}, {case.label}", error)
    gc.enable()


@dataclass(frozen=True)
class Row:
    """A line of the results. A figure that was not measured is None."""

    family: str
    form: str
    shape: str
    dtype: str
    direction: str
    bytes: int
    variant: str
    method: str
    rounds: int
    seconds: float | None  # per call, the median
    spread: float | None  # interquartile range over the median
    gigabytes_per_second: float | None
    percent_of_copy: float | None
    ratio_to_eager: float | None  # torch eager's seconds over this one's: above 1 is faster than eager
    host_seconds: float | None  # to enqueue a call, without waiting for the device
    error: str


def summarise(family: Family, case: Case, results: dict[str, Result]) -> list[Row]:
    """The rows of one case."""
    times = {name: [seconds for seconds, _ in result.samples] for name, result in results.items()}
    medians = {name: statistics.median(seconds) for name, seconds in times.items() if seconds}
    rows = []
    for name, result in results.items():
        own = medians.get(name)
        hosts = [host for _, host in result.samples if host is not None]
        rows.append(
            Row(
                family=family.name,
                form=case.form,
                shape="x".join(map(str, case.shape)),
                dtype=str(case.dtype).removeprefix("torch."),
                direction=case.direction,
                bytes=case.bytes,
                variant=name,
                method=result.method,
                rounds=len(result.samples),
                seconds=own,
                spread=_spread(times[name]),
                gigabytes_per_second=case.bytes / own / 1e9 if own else None,
                percent_of_copy=100 * medians[COPY] / own if own and COPY in medians else None,
                ratio_to_eager=medians[EAGER] / own if own and EAGER in medians else None,
                host_seconds=statistics.median(hosts) if hosts else None,
                error=result.error,
            )
        )
    return rows


def _spread(seconds: list[float]) -> float | None:
    if len(seconds) < 2:
        return None
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / median

"""``python -m benchmarks [family ...] [--quick] [--device cpu|cuda] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import memkern
from benchmarks import harness, report
from benchmarks.timing import CpuClock, CudaClock, freed_memory_kept

FAMILIES = ("gelu", "norm", "softmax", "cross_entropy", "optim")


def run(family: harness.Family, device: torch.device, quick: bool, out: Path | None) -> None:
    """Measure one family, print the table and write the files."""
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    environment = report.environment(device, clock.cache_bytes)
    variants = harness.variants(family, device, quick)
    cases = family.cases(device.type, quick)
    groups = []
    for number, case in enumerate(cases, 1):
        print(f"{family.name} {number}/{len(cases)}: {case.label}", file=sys.stderr)
        effort = harness.QUICK if quick else harness.FULL
        groups.append(harness.summarise(family, case, harness.measure(family, case, variants, clock, device, effort)))

    report.show(
        f"{family.name} on {environment['device']}, torch {environment['torch']}, threads: {environment['threads']}",
        f"x torch eager: above 1 is faster than torch eager. {family.formula}.",
        [[report.cells(case, row) for row in group] for case, group in zip(cases, groups, strict=True)],
    )
    folder = out or Path(__file__).parent / "results" / f"{environment['date']}-{report.slug(environment['device'])}"
    report.write(folder, family, [row for group in groups for row in group], environment)
    report.plot(folder, family, [case.label for case in cases], groups, environment["device"])
    print(f"Written: {family.name}.* in {folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Time memkern's ops beside PyTorch's own."
    )
    parser.add_argument(
        "families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; all where none is named"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few cases, few repeats; no torch.compile, no reference backend"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the files (default: benchmarks/results/<date>-<device>)")
    options = parser.parse_args(arguments)
    for name in options.families:
        if name not in FAMILIES:
            parser.error(f"family: got {name!r}, needs one of {', '.join(FAMILIES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got 'cuda', but torch finds no CUDA device here")

    device = torch.device(options.device)
    for name in memkern.backends.names():
        reason = harness.why_not(name, device)
        if reason is not None:
            print(f"Not timed: {reason}")
    with freed_memory_kept():
        for name in options.families or FAMILIES:
            run(importlib.import_module(f"benchmarks.{name}").FAMILY, device, options.quick, options.out)


if __name__ == "__main__":
    main()

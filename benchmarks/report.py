"""The results: a table on the terminal, JSON and CSV files, a plot."""

from __future__ import annotations

import csv
import datetime
import json
import platform
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

import memkern
from benchmarks.harness import COPY, EAGER, Case, Family, Row, why_not

COLUMNS = ("case", "variant", "µs", "± %", "GB/s", "% of copy", "x torch eager", "host µs")


def device_name(device: torch.device) -> str:
    """The processor's or GPU's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else f"{platform.machine()} CPU"


def slug(name: str) -> str:
    """``name`` as part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def environment(device: torch.device, cache_bytes: int) -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine or its folders."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "cache_bytes": cache_bytes,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "memkern": memkern.__version__,
        "memkern_backends": [name for name in memkern.backends.names() if why_not(name, device) is None],
    }


def cells(case: Case, row: Row) -> list[str]:
    """A row of the table, as wide as ``COLUMNS``."""
    if row.error:
        return [case.label, f"{row.variant}: {row.error}", "failed", "", "", "", "", ""]

    def figure(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return [
        case.label,
        row.variant,
        figure(row.seconds and row.seconds * 1e6, "{:.1f}"),
        figure(row.spread and row.spread * 100, "{:.0f}"),
        figure(row.gigabytes_per_second, "{:.1f}"),
        figure(row.percent_of_copy, "{:.0f}"),
        figure(row.ratio_to_eager, "{:.2f}"),
        figure(row.host_seconds and row.host_seconds * 1e6, "{:.1f}"),
    ]


def show(title: str, caption: str, groups: list[list[list[str]]]) -> None:
    """Print a table under ``COLUMNS``, its rows in groups, with rich or without."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [list(COLUMNS), *(line for group in groups for line in group)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print("", title, *("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines), caption, sep="\n")
        return
    table = Table(title=title, caption=caption, caption_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for group in groups:
        for line in group:
            table.add_row(*line)
        table.add_section()
    console = Console()
    console.width = max(console.width, 132)  # a file or a narrow terminal would lose columns
    console.print(table)


def write(folder: Path, family: Family, rows: list[Row], environment: dict[str, Any]) -> None:
    """``<family>.json`` (environment and rows) and ``<family>.csv`` (rows) in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment, "formula": family.formula, "rows": [asdict(row) for row in rows]}
    (folder / f"{family.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    with open(folder / f"{family.name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def plot(folder: Path, family: Family, labels: list[str], rows: list[list[Row]], device: str) -> None:
    """``<family>.png`` in ``folder``: how many times faster than torch eager, a line of dots a case."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No plot: matplotlib is not installed.")
        return
    figure = Figure(figsize=(9, 1.6 + 0.25 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color="black", linewidth=1, label=EAGER)
    names = dict.fromkeys(row.variant for group in rows for row in group if row.variant not in (COPY, EAGER))
    for name in names:
        points = [
            (row.ratio_to_eager, place)
            for place, group in enumerate(rows)
            for row in group
            if row.variant == name and row.ratio_to_eager
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o", label=name)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.1, 0.2, 0.5, 1, 2, 5], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("speed, in multiples of torch eager (right of 1 is faster)")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set_title(f"{family.name} on {device}")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(folder / f"{family.name}.png", dpi=120)

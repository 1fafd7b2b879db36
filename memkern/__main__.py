"""``python -m memkern demo`` and ``python -m memkern info``."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import memkern
from memkern import demo


def version_of(module: str) -> str:
    try:
        return importlib.import_module(module).__version__
    except Exception as error:  # a package that is installed but broken may raise anything
        return f"none ({error})"


def versions() -> Table:
    table = Table(title="Versions", title_justify="left", show_header=False)
    table.add_row("memkern", memkern.__version__)
    table.add_row("Python", platform.python_version())
    table.add_row("PyTorch", torch.__version__)
    table.add_row("CUDA of PyTorch", torch.version.cuda or "none")
    if torch.version.hip:
        table.add_row("ROCm of PyTorch", torch.version.hip)
    table.add_row("Triton", version_of("triton"))
    for compiler in ("nvcc", "g++", "clang++"):
        table.add_row(compiler, shutil.which(compiler) or "not on PATH")
    return table


def devices() -> Table:
    table = Table(title="Devices", title_justify="left", show_header=False)
    table.add_row("CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        table.add_row("GPU", "none that this PyTorch sees")
        return table
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        size = f"{gpu.total_memory / 2**30:.1f} GiB"
        table.add_row(f"cuda:{i}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {size}")
    return table


def backends() -> Table:
    """What each backend does for CPU and for CUDA tensors."""
    on_cpu, on_cuda = memkern.backends.explain("cpu"), memkern.backends.explain("cuda")
    cuda = "CUDA tensors" if torch.cuda.is_available() else "CUDA tensors (no GPU here)"
    table = Table("Backend", "CPU tensors", cuda, title="Backends", title_justify="left", show_lines=True)
    for name in memkern.backends.names():
        table.add_row(name, on_cpu[name], on_cuda[name])
    return table


def whole_number(low: int, high: int = 10**9) -> Callable[[str], int]:
    """An argparse type: a whole number in this range."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"got {text!r}, needs a whole number from {low} to {high}")
        return int(text)

    return parse


def usable_device(text: str) -> torch.device:
    """An argparse type: "cpu", or a GPU that this PyTorch sees."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if text not in usable:
        raise argparse.ArgumentTypeError(f"got {text!r}, needs one of those usable here: {', '.join(usable)}")
    device = torch.device(text)
    try:
        memkern.backends.choose(torch.empty(0, device=device))
    except RuntimeError as error:  # MEMKERN_BACKEND names one that does not serve it
        raise argparse.ArgumentTypeError(str(error)) from error
    return device


def writable_file(text: str) -> Path:
    """An argparse type: a file that can be written, found out before the training and not after it."""
    path = Path(text)
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"got {text!r}, needs a file name in a directory that can be written")
    return path


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``memkern demo``."""
    default = "default: {} on a CPU, {} on a GPU"
    parser.add_argument("--steps", type=whole_number(1), metavar="N",
                        help=f"steps of each training ({default.format(demo.ON_CPU.steps, demo.ON_GPU.steps)})")
    parser.add_argument("--layers", type=whole_number(1), metavar="N",
                        help=f"layers of the model ({default.format(demo.ON_CPU.layers, demo.ON_GPU.layers)})")
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N",
                        help="for the first weights and the batches (default: %(default)s)")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--out", type=writable_file, default="memkern-demo.png", metavar="FILE",
                        help="the PNG with the loss curves and the memory bars (default: %(default)s)")


def main(arguments: list[str] | None = None) -> None:
    """The command line. ``arguments``: in place of ``sys.argv[1:]``."""
    parser = argparse.ArgumentParser(prog="memkern", description=memkern.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, which backend serves what and why not the others")
    about = "train one small GPT twice from one seed: with PyTorch's layers and with memkern's"
    add_demo_options(commands.add_parser("demo", help=about, description=about))
    options = vars(parser.parse_args(arguments))
    if options.pop("command") == "demo":
        demo.run(**options)
    else:
        console = Console(markup=False)  # error messages may hold square brackets
        for table in (versions(), devices(), backends()):
            console.print(table)


if __name__ == "__main__":
    main()

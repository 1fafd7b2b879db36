"""``memkern demo``: one small GPT, trained twice from one seed, with PyTorch's parts and with memkern's.

The model reads bytes; its text is the help pages that come with Python (``pydoc_data.topics``). Both
trainings take the same first weights and the same batches, step by step in turn, so that whatever else
the machine is doing slows both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import memkern
from memkern import memory

MIB = 2**20
BYTE_VALUES = 256
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Parts:
    """Everything that differs between the two trainings."""

    name: str
    fuse: Callable[[nn.Module], object]  # what is done to the model, which is made of PyTorch's layers
    attention: Callable[..., Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden, weight and target
    optimizer: Callable[..., torch.optim.Optimizer]
    scaler: Callable[[str], torch.amp.GradScaler]


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


PYTORCH = Parts(
    name="PyTorch",
    fuse=lambda model: None,
    # In both: it saves nothing of the size of the scores, so less than any softmax of them that is written to memory.
    attention=F.scaled_dot_product_attention,
    linear_cross_entropy=_linear_cross_entropy,
    optimizer=torch.optim.AdamW,
    scaler=torch.amp.GradScaler,
)
MEMKERN = replace(
    PYTORCH,
    name="memkern",
    fuse=memkern.patch,
    linear_cross_entropy=memkern.functional.linear_cross_entropy,
    optimizer=memkern.optim.AdamW,
    scaler=memkern.amp.GradScaler,
)


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training. ``context`` and ``batch`` are in bytes and sequences."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


ON_CPU = Config(layers=3, width=128, heads=4, context=128, batch=16, steps=300, learning_rate=1e-3)
ON_GPU = Config(layers=4, width=512, heads=8, context=512, batch=32, steps=500, learning_rate=6e-4)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Shapes: (batch, context, width) in and out."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.heads, self.attention = config.heads, parts.attention
        self.attention_norm = nn.LayerNorm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.queries_keys_values(self.attention_norm(x))
        # Each of q, k, v: (batch, heads, context, width / heads).
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = self.attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes (batch, context) in, (batch, context, width) out, of which ``logits`` makes those of the next byte."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_VALUES, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, parts) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, BYTE_VALUES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)  # so that the first loss is ln 256

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.norm(self.blocks(x))


class Training:
    """A model in training: its optimizer, its loss scaler and what came of its steps so far."""

    def __init__(self, parts: Parts, config: Config, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.parts, self.device, self.dtype = parts, device, dtype
        self.model = GPT(config, parts).to(device)
        parts.fuse(self.model)
        self.optimizer = parts.optimizer(self.model.parameters(), lr=config.learning_rate)
        self.scaler = parts.scaler(device.type)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.skipped = 0

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss, in nats a byte, on (batch, context + 1) bytes."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.model(batch[:, :-1])
            weight, target = self.model.logits.weight, batch[:, 1:].flatten()
            return self.parts.linear_cross_entropy(hidden.flatten(0, 1), weight, target)

    def step(self, batch: Tensor) -> None:
        scale = self.scaler.get_scale()
        start = time.perf_counter()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.skipped += self.scaler.get_scale() < scale  # the scaler backs off exactly when it skips

    @property
    def final_loss(self) -> float:
        return statistics.fmean(self.losses[-10:])


class Batches:
    """Pieces of the text at random places: the same ones, in the same order, for the same seed."""

    def __init__(self, config: Config, device: torch.device, seed: int) -> None:
        self.text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
        self.config, self.device = config, device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """(batch, context + 1) bytes."""
        length = self.config.context + 1
        starts = torch.randint(len(self.text) - length, (self.config.batch, 1), generator=self.generator)
        return self.text[starts + torch.arange(length)].to(self.device)


@dataclass(frozen=True)
class Memory:
    """Bytes one step keeps for backward, bytes of optimizer state, the number of parameters they are for, and
    the most GPU memory in use, in bytes (None: no GPU)."""

    saved: int
    optimizer: int
    parameters: int
    peak: int | None


def measure_memory(training: Training, batch: Tensor) -> Memory:
    """Take ten steps and a forward pass of a training that has the GPU to itself.

    The optimizer's state is made in the first step that is not skipped, and the peak is in a step after it;
    while the loss scale comes down from 65536, fp16 may skip a few.
    """
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(training.device)
    for _ in range(10):
        training.step(batch)
    peak = torch.cuda.max_memory_allocated(training.device) if on_gpu else None
    parameters = list(training.model.parameters())
    with memory.saved_for_backward(exclude=parameters) as saved:
        training.loss(batch)
    state = memory.optimizer_bytes(training.optimizer)
    return Memory(saved.bytes, state, sum(p.numel() for p in parameters), peak)


def matmul_ms(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """Median time of a (size, size) matrix product on the CPU, in milliseconds, after one that is not counted."""
    a = torch.randn(size, size).to(dtype)
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        a @ a
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def quick_dtype(milliseconds: dict[torch.dtype, float]) -> torch.dtype:
    """The first 16-bit type, fp16 before bf16, whose matrix product is no slower than fp32's; else fp32."""
    for dtype in (torch.float16, torch.bfloat16):
        if milliseconds[dtype] <= milliseconds[torch.float32]:
            return dtype
    return torch.float32


def choose_dtype(device: torch.device, console: Console) -> torch.dtype:
    """The type for autocast (fp32: none); says which and why."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        console.print(f"Device: {name}. Autocast to fp16, with GradScaler.", soft_wrap=True)
        return torch.float16
    milliseconds = {dtype: matmul_ms(dtype) for dtype in NAMES}
    times = ", ".join(f"{milliseconds[dtype]:.3g} ms in {name}" for dtype, name in NAMES.items())
    dtype = quick_dtype(milliseconds)
    if dtype == torch.float32:
        choice = "No 16-bit type is as quick as fp32 on this processor: no autocast, but GradScaler all the same."
    else:
        choice = f"Autocast to {NAMES[dtype]}, the first 16-bit type at least as quick as fp32 here, with GradScaler."
    console.print(f"Device: CPU. A 512 x 512 matrix product takes {times}.\n{choice}", soft_wrap=True)
    return dtype


def train(trainings: list[Training], batches: Batches, steps: int, console: Console) -> None:
    """Take the steps, in turn on the same batch, behind a progress bar that shows both losses."""
    losses = TextColumn("loss {task.fields[losses]}")
    with Progress(TextColumn("Training"), BarColumn(), MofNCompleteColumn(), losses, TimeRemainingColumn(),
                  console=console) as progress:
        task = progress.add_task("", total=steps, losses="")
        for _ in range(steps):
            batch = batches.next()
            for training in trainings:
                training.step(batch)
            progress.update(task, advance=1, losses=" / ".join(f"{t.losses[-1]:.2f}" for t in trainings))


def results(trainings: list[Training], memories: list[Memory]) -> Table:
    """The two trainings side by side. A ratio below 1 means that memkern needs less."""
    table = Table(title="The same training with two sets of parts", title_justify="left",
                  caption="Final loss: mean of the last 10 steps.", caption_justify="left")
    table.add_column("")
    for training in trainings:
        table.add_column(training.parts.name, justify="right")
    table.add_column(" / ".join(t.parts.name for t in reversed(trainings)), justify="right")

    def add(label: str, values: list[float], form: str) -> None:
        ratio = f"{values[1] / values[0]:.3f}" if values[0] else ""
        table.add_row(label, *(format(value, form) for value in values), ratio)

    add("Final loss (nats/byte)", [t.final_loss for t in trainings], ".4f")
    add("Saved for backward per step (MiB)", [m.saved / MIB for m in memories], ".2f")
    add("Optimizer state (bytes/parameter)", [m.optimizer / m.parameters for m in memories], ".2f")
    peaks = [m.peak / MIB for m in memories if m.peak is not None]
    if peaks:
        add("Peak GPU memory (MiB)", peaks, ".1f")
    else:
        table.add_row("Peak GPU memory (MiB)", "no GPU", "no GPU", "")
    add("Step time (ms, median)", [1e3 * statistics.median(t.seconds) for t in trainings], ".1f")
    add("Skipped steps", [t.skipped for t in trainings], "d")
    return table


def plot(trainings: list[Training], memories: list[Memory], title: str, path: Path) -> None:
    """Loss curves and memory bars, as a PNG."""
    from matplotlib.figure import Figure  # here, so that memkern info runs without matplotlib

    figure = Figure(figsize=(11, 4.5), dpi=150, layout="constrained")  # no pyplot: needs no display, changes no backend
    figure.suptitle(f"memkern demo: {title}")
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))

    # The curves nearly coincide, so the second is a thin line on a broad one.
    looks = ({"color": "#f2a65a", "linewidth": 4}, {"color": "#1d4e89", "linewidth": 1})
    for training, look in zip(trainings, looks, strict=True):
        curves.plot(range(1, len(training.losses) + 1), training.losses, label=training.parts.name, **look)
    curves.set(title="Training loss", xlabel="step", ylabel="loss (nats per byte)")
    curves.legend(frameon=False)
    curves.grid(alpha=0.3)

    kinds = {"saved for\nbackward": [m.saved for m in memories], "optimizer\nstate": [m.optimizer for m in memories]}
    if peaks := [m.peak for m in memories if m.peak is not None]:
        kinds["peak GPU\nmemory"] = peaks
    for i, (training, look) in enumerate(zip(trainings, looks, strict=True)):
        places = [kind + 0.4 * (i - 0.5) for kind in range(len(kinds))]
        drawn = bars.bar(places, [values[i] / MIB for values in kinds.values()], width=0.38, color=look["color"],
                         label=training.parts.name)
        bars.bar_label(drawn, fmt="%.1f", padding=2)
    bars.set_xticks(range(len(kinds)), list(kinds))
    bars.set(title="Memory of one training", ylabel="MiB")
    bars.margins(y=0.12)
    bars.legend(frameon=False)

    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def run(steps: int | None, layers: int | None, seed: int, device: torch.device, out: Path) -> None:
    """The whole demo. ``steps`` and ``layers``: None takes the default for the device."""
    console = Console(markup=False)  # file names and error messages may hold square brackets
    config = ON_GPU if device.type == "cuda" else ON_CPU
    config = replace(config, steps=steps or config.steps, layers=layers or config.layers)
    dtype = choose_dtype(device, console)

    first_batch = Batches(config, device, seed).next()
    both = (PYTORCH, MEMKERN)
    memories = [measure_memory(Training(parts, config, device, dtype, seed), first_batch) for parts in both]
    trainings = [Training(parts, config, device, dtype, seed) for parts in both]
    title = (f"{config.layers}-layer GPT of width {config.width}, {memories[0].parameters / 1e6:.2f}M parameters, "
             f"{config.batch} x {config.context} bytes a step, {NAMES[dtype]}")
    console.print(f"Model: {title}.", soft_wrap=True)
    backend = memkern.backends.choose(torch.empty(0, dtype=dtype, device=device))
    note = ": right but slow, memkern info says what is missing" if backend == "reference" else ""
    console.print(f"memkern's kernels run on the {backend} backend{note}.", soft_wrap=True)

    train(trainings, Batches(config, device, seed), config.steps, console)
    console.print(results(trainings, memories))
    plot(trainings, memories, title, out)
    console.print(f"Loss curves and memory bars: {out.absolute()}", highlight=False, soft_wrap=True)

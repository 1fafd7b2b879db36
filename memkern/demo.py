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
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import memkern
from memkern import memory

MIB = 2**20
BYTE_VALUES = 256


@dataclass(frozen=True)
class Parts:
    """Everything that differs between the two trainings."""

    name: str
    gelu: Callable[..., nn.Module]
    layer_norm: Callable[..., nn.Module]
    attention: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]


PYTORCH = Parts(
    name="PyTorch",
    gelu=nn.GELU,
    layer_norm=nn.LayerNorm,
    attention=F.scaled_dot_product_attention,
    cross_entropy=F.cross_entropy,
    optimizer=torch.optim.AdamW,
)
MEMKERN = replace(PYTORCH, name="memkern", gelu=memkern.nn.GELU)


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


ON_CPU = Config(layers=3, width=128, heads=4, context=128, batch=16, steps=300, learning_rate=2e-3)
ON_GPU = Config(layers=4, width=512, heads=8, context=512, batch=32, steps=500, learning_rate=1e-3)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Shapes: (batch, context, width) in and out."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.heads, self.attention = config.heads, parts.attention
        self.attention_norm = parts.layer_norm(config.width)
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            parts.layer_norm(config.width),
            nn.Linear(config.width, 4 * config.width),
            parts.gelu(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.queries_keys_values(self.attention_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width/heads)
        attended = self.attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes (batch, context) in, logits of the next byte (batch, context, 256) out."""

    def __init__(self, config: Config, parts: Parts) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTE_VALUES, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(*(Block(config, parts) for _ in range(config.layers)))
        self.norm = parts.layer_norm(config.width)
        self.logits = nn.Linear(config.width, BYTE_VALUES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)  # so that the first loss is ln 256

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.logits(self.norm(self.blocks(x)))


class Training:
    """A model in training: its optimizer, its loss scaler and what came of its steps so far."""

    def __init__(self, parts: Parts, config: Config, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.parts, self.device, self.dtype = parts, device, dtype
        self.model = GPT(config, parts).to(device)
        self.optimizer = parts.optimizer(self.model.parameters(), lr=config.learning_rate)
        self.scaler = torch.amp.GradScaler(device.type)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.skipped = 0

    def loss(self, batch: Tensor) -> Tensor:
        """Mean loss, in nats a byte, on (batch, context + 1) bytes."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(batch[:, :-1])
            return self.parts.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

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
    """Bytes one step keeps for backward, bytes of optimizer state, and the most GPU memory in use (None: no GPU)."""

    saved: int
    optimizer: int
    parameters: int
    peak: int | None


def measure_memory(training: Training, batch: Tensor) -> Memory:
    """Take two steps and a forward pass of a training that has the GPU to itself."""
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(training.device)
    training.step(batch)
    training.step(batch)  # the first step makes the optimizer's state, so only the second shows the peak
    peak = torch.cuda.max_memory_allocated(training.device) if on_gpu else None
    parameters = list(training.model.parameters())
    with memory.saved_for_backward(exclude=parameters) as saved:
        training.loss(batch)
    return Memory(saved.bytes, memory.optimizer_bytes(training.optimizer), sum(p.numel() for p in parameters), peak)


def matmul_ms(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """Median time of a (size, size) matrix product on the CPU, in milliseconds."""
    a = torch.randn(size, size).to(dtype)
    a @ a
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def choose_dtype(milliseconds: dict[torch.dtype, float]) -> torch.dtype:
    """The first 16-bit type, fp16 before bf16, whose matrix product is no slower than fp32's; else fp32."""
    for dtype in (torch.float16, torch.bfloat16):
        if milliseconds[dtype] <= milliseconds[torch.float32]:
            return dtype
    return torch.float32


def dtype_for(device: torch.device, console: Console) -> torch.dtype:
    """The type for autocast on this device; says which and why."""
    if device.type == "cuda":
        console.print(f"Device: {torch.cuda.get_device_name(device)}. Autocast to fp16, with GradScaler.")
        return torch.float16
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    milliseconds = {dtype: matmul_ms(dtype) for dtype in names}
    dtype = choose_dtype(milliseconds)
    console.print("Device: CPU. A 512x512 matrix product takes "
                  + ", ".join(f"{ms:.3g} ms in {names[d]}" for d, ms in milliseconds.items()) + ".")
    if dtype == torch.float32:
        console.print("No 16-bit type is as quick as fp32 on this processor: no autocast, GradScaler all the same.")
    else:
        console.print(f"Autocast to {names[dtype]}, the first 16-bit type at least as quick as fp32, with GradScaler.")
    return dtype


def train(config: Config, device: torch.device, dtype: torch.dtype, seed: int, console: Console) -> list[Training]:
    """Measure the memory of each set of parts alone, then train both in turn on the same batches."""
    both = (PYTORCH, MEMKERN)
    first_batch = Batches(config, device, seed).next()
    memories = [measure_memory(Training(parts, config, device, dtype, seed), first_batch) for parts in both]
    trainings = [Training(parts, config, device, dtype, seed) for parts in both]
    batches = Batches(config, device, seed)
    losses = TextColumn("loss {task.fields[losses]}")
    with Progress(TextColumn("Training"), BarColumn(), MofNCompleteColumn(), losses, TimeRemainingColumn(),
                  console=console) as progress:
        task = progress.add_task("", total=config.steps, losses="")
        for _ in range(config.steps):
            batch = batches.next()
            for training in trainings:
                training.step(batch)
            progress.update(task, advance=1, losses=" / ".join(f"{t.losses[-1]:.2f}" for t in trainings))
    return trainings

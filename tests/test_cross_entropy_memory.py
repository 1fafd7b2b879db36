"""Bytes that the losses save and hold at a time, beside PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from memkern import memory
from memkern.functional import cross_entropy, distillation_loss, linear_cross_entropy
from tests.norm_cases import HALVES
from tests.peak import peak_bytes
from tests.test_cross_entropy import classes_of, random

MIB = 2**20
GPT2 = 50_257  # classes
KINDS = {"saved logits": {}, "gradient in forward": {"grad_in_forward": True},
         "over the logits": {"grad_in_forward": True, "overwrite_logits": True}}  # fmt: skip


def test_the_peak_is_the_peak() -> None:
    x = torch.ones(MIB // 4)

    def f() -> None:
        y = x + 1  # 1 MiB
        y = y + 1  # 2, then 1 again
        del y
        (x + 1).sum()

    assert peak_bytes(f) == pytest.approx(2 * MIB, rel=1e-3)
    assert peak_bytes(lambda: x.bfloat16() + x) == pytest.approx(2.5 * MIB, rel=1e-3)  # the copy that + makes, too


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_saved(backend, device, dtype) -> None:
    """The logits as they are, the target and 4 bytes a row; of a teacher the logits, too, and 8."""
    x, teacher = random(2, 6, 100).to(device, dtype).unbind()
    x, target = x.clone().requires_grad_(), classes_of(6, 100).to(device)
    for context in (torch.autocast(device, dtype), torch.autocast(device, dtype, enabled=False)):
        with context, memory.saved_for_backward() as saved:
            loss = cross_entropy(x, target, reduction="sum")
        assert saved.bytes == x.nbytes + target.nbytes + 4 * 6
        with context, memory.saved_for_backward() as saved:
            loss = distillation_loss(x, teacher.clone(), reduction="sum")
        assert saved.bytes == 2 * x.nbytes + 8 * 6
        assert loss.requires_grad


def step(loss_function, logits: Tensor, target: Tensor, **options) -> None:
    """Forward and backward, under autocast, of logits that nothing but the loss holds."""
    with torch.autocast("cpu", logits.dtype):
        loss_function(logits + 0, target, **options).backward()  # whose backward makes nothing
    logits.grad = None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_peak_of_cross_entropy(dtype) -> None:
    """2048 x 50,257 16-bit logits under autocast: at most 0.35 of PyTorch's, the logits included."""
    logits, target = torch.randn(2048, GPT2).to(dtype).requires_grad_(), classes_of(2048, GPT2)
    torchs = peak_bytes(lambda: step(F.cross_entropy, logits, target))
    peaks = {name: peak_bytes(lambda o=o: step(cross_entropy, logits, target, **o)) for name, o in KINDS.items()}
    print({name: f"{peak / MIB:.0f} MiB, {peak / torchs:.3f} of PyTorch's" for name, peak in peaks.items()})
    size = logits.nbytes
    assert peaks["saved logits"] <= 0.35 * torchs and peaks["gradient in forward"] <= 0.35 * torchs
    assert peaks["saved logits"] <= 2.1 * size  # the logits and their gradient
    assert peaks["over the logits"] <= 1.2 * size  # one of them at a time, and slices of the last product


def test_peak_of_linear_cross_entropy() -> None:
    """8192 tokens x 50,257 classes x 768 features under autocast to bfloat16: at most 0.15 of PyTorch's chain."""
    tokens, features = 8192, 768
    hidden = torch.randn(tokens, features, requires_grad=True)
    weight = (0.02 * torch.randn(GPT2, features)).requires_grad_()
    target = classes_of(tokens, GPT2)
    functions = {
        "memkern": lambda: linear_cross_entropy(hidden, weight, target),
        "PyTorch": lambda: F.cross_entropy(F.linear(hidden, weight), target),
    }
    peaks, results = {}, {}

    def training(name: str) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functions[name]()
        loss.backward()
        results[name] = loss.item(), hidden.grad, weight.grad
        hidden.grad = weight.grad = None

    for name in functions:
        peaks[name] = peak_bytes(lambda name=name: training(name))
    print({name: f"{peak / MIB:.0f} MiB" for name, peak in peaks.items()}, f"{peaks['memkern'] / peaks['PyTorch']:.3f}")
    assert peaks["memkern"] <= 0.15 * peaks["PyTorch"]
    (ours, *gradients), (torchs, *expected) = results["memkern"], results["PyTorch"]
    assert ours == pytest.approx(torchs, rel=1e-4)
    for found, value in zip(gradients, expected, strict=True):
        assert (found - value).abs().max() <= 2e-2 * value.abs().max()


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_peak_of_linear_cross_entropy_in_every_dtype(backend, device, dtype) -> None:
    """A few times the weight and a chunk, whatever the number of tokens."""
    if device != "cpu" or backend in ("triton", "emulated"):
        pytest.skip(f"{backend}: the peak is counted on the CPU, at full speed")
    weight = (0.02 * random(4096, 64, seed=1)).to(dtype).requires_grad_()
    peaks = []
    for tokens in (512, 2048):
        hidden, target = random(tokens, 64).to(dtype).requires_grad_(), classes_of(tokens, 4096)
        peaks.append(
            peak_bytes(lambda h=hidden, t=target: linear_cross_entropy(h, weight, t, chunk_tokens=64).backward())
        )
        hidden.grad = weight.grad = None
    per_token = 64 * (4 + 2 * dtype.itemsize) + 4 * 8  # dh in two dtypes; loss, lse and what they are made of
    wide = 4 * weight.numel()
    chunk = 64 * 4096 * 8 * (4 if backend == "reference" else 1)  # in fp64, which the reference takes several of
    assert peaks[0] <= 5 * wide + chunk + 512 * per_token
    assert peaks[1] - peaks[0] <= 1.1 * 1536 * per_token


def test_patched_loss_saves_less(backend, device) -> None:
    model = torch.nn.CrossEntropyLoss()
    x, target = random(8, 200).to(device, torch.bfloat16).requires_grad_(), classes_of(8, 200).to(device)
    saved = []
    for patched in (False, True):
        if patched:
            memkern.patch(model)
        with torch.autocast(device, torch.bfloat16), memory.saved_for_backward() as found:
            model(x, target)
        saved.append(found.bytes)
    assert saved[1] < 0.6 * saved[0]

"""What the CUDA kernels of cross-entropy and distillation move through memory, counted on the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memkern import ops
from tests import emulator
from tests.test_cross_entropy import IGNORED, arguments, classes_of, random

SECTOR = 32
pytestmark = pytest.mark.usefixtures("emulated")


def counted(name: str, *given) -> dict:
    """The one launch of the op ``name``."""
    with emulator.counting() as launches:
        ops.op("emulated", name)(*given)
    assert len(launches) == 1
    return launches[0]


def sectors(launch: dict) -> tuple[int, int]:
    """Sectors loaded and stored; fails where an access touches more than it needs."""
    for way in ("loaded", "stored"):
        assert launch[way]["sectors"] == launch[way]["sectors_needed"], launch
    return launch["loaded"]["sectors"], launch["stored"]["sectors"]


def warps_of_a_row(launch: dict, rows: int) -> int:
    """How many read what there is once a row."""
    return max(launch["block"] * launch["grid"] // rows // 32, 1)


def both_ways(logits: Tensor, target: Tensor, *rest) -> tuple[dict, dict]:
    """The launches of forward and of backward, where it is the same over the logits."""
    loss, lse = ops.op("emulated", "cross_entropy_forward")(logits, *arguments(target, *rest))
    forward = counted("cross_entropy_forward", logits, *arguments(target, *rest))
    backward = counted("cross_entropy_backward", loss, logits, lse, *arguments(target, *rest))
    over = counted("cross_entropy_backward_", loss, logits.clone(), lse, *arguments(target, *rest))
    assert all(over[key] == backward[key] for key in ("loaded", "stored", "grid", "block"))
    return forward, backward


@pytest.mark.parametrize("options", [(), (None, IGNORED, 0.1, 1e-4, 30.0)], ids=["plain", "all options"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(64, 128), (16, 1024), (8, 4096), (4, 32_000), (2, 262_144)])
def test_logits_are_read_once_and_their_gradient_written_once(rows, classes, dtype, options) -> None:
    """2 and 4 bytes an element in 16 bit; a sector for every number a row, for each warp that reads it."""
    forward, backward = both_ways(random(rows, classes).to(dtype), classes_of(rows, classes), *options)
    of_logits = rows * classes * dtype.itemsize // SECTOR
    assert sectors(forward) == (of_logits + 2 * rows, 2 * rows)  # the index, its logit; loss, lse
    assert sectors(backward) == (of_logits + 3 * rows * warps_of_a_row(backward, rows), of_logits)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(16, 1024), (8, 8192), (2, 32_000)])
def test_probabilities_are_read_once_more(rows, classes, q_dtype) -> None:
    """In backward twice where a row of their shares does not fit shared memory: the second time from the cache."""
    q = random(rows, classes).softmax(1).to(q_dtype)
    forward, backward = both_ways(random(rows, classes).bfloat16(), q)
    of_logits, of_q = rows * classes * 2 // SECTOR, rows * classes * q_dtype.itemsize // SECTOR
    times = 1 if classes <= 8192 else 2
    # The fp32 values of a 16-byte pack of logits are two accesses, of every other 16 bytes.
    assert forward["loaded"]["sectors"] == of_logits + (q_dtype.itemsize // 2) * of_q
    assert forward["loaded"]["bytes"] == rows * classes * (2 + q_dtype.itemsize)
    of_rows = 8 * backward["grid"] * backward["block"]  # dloss and lse, in every thread
    assert backward["loaded"]["bytes"] == rows * classes * (2 + times * q_dtype.itemsize) + of_rows
    assert backward["stored"]["sectors"] == of_logits


def test_class_weights_are_read_where_they_are_needed() -> None:
    rows, classes = 4, 4096
    logits, target, weight = random(rows, classes).half(), classes_of(rows, classes), torch.ones(classes)
    forward, backward = both_ways(logits, target, weight)
    of_logits, warps = rows * classes * 2 // SECTOR, warps_of_a_row(backward, rows)
    assert sectors(forward) == (of_logits + 3 * rows, 2 * rows)
    assert sectors(backward) == (of_logits + 4 * rows * warps, of_logits)
    forward, _ = both_ways(logits, target, weight, IGNORED, 0.1)
    assert forward["loaded"]["bytes"] <= rows * classes * (2 + 4) + rows * 8 * 256


def test_ignored_rows_are_not_read_in_backward() -> None:
    rows, classes = 8, 4096
    target = torch.full((rows,), IGNORED)
    target[3] = 5
    _, backward = both_ways(random(rows, classes).half(), target)
    of_a_row = classes * 2 // SECTOR
    assert sectors(backward) == (of_a_row + 3 * rows * warps_of_a_row(backward, rows), rows * of_a_row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [1001, 4099, 50_257])
def test_rows_of_any_alignment_have_wide_accesses(classes, dtype) -> None:
    """Every sector is touched once, but for one a row at either end of the packs."""
    rows, size = 16, dtype.itemsize
    logits = random(rows, classes).to(dtype)
    forward, backward = both_ways(logits, classes_of(rows, classes))
    begins = [logits.data_ptr() + row * classes * size for row in range(rows)]
    spanned = sum((begin + classes * size - 1) // SECTOR - begin // SECTOR + 1 for begin in begins)
    assert spanned <= forward["loaded"]["sectors"] - 2 * rows <= spanned + 2 * rows
    assert spanned <= backward["loaded"]["sectors"] - 3 * rows * warps_of_a_row(backward, rows) <= spanned + 2 * rows
    assert spanned <= backward["stored"]["sectors"] <= spanned + 2 * rows
    # 512 bytes a warp access in the packs, else it would be 32 elements.
    assert backward["stored"]["warp_accesses"] <= rows * (classes * size / 512 + 4 + backward["block"] / 32)


def test_rows_that_lie_apart_need_no_copy() -> None:
    rows, classes = 8, 4096
    logits = random(rows, classes + 64).bfloat16()[:, :classes]
    forward, backward = both_ways(logits, classes_of(rows, classes))
    of_logits = rows * classes * 2 // SECTOR
    assert sectors(forward) == (of_logits + 2 * rows, 2 * rows)
    assert backward["stored"]["sectors"] == of_logits


@pytest.mark.parametrize(("rows", "classes"), [(16, 1024), (4, 32_000)])
@pytest.mark.parametrize("temperature", (1.0, 50.0))
def test_distillation_reads_both_once(rows, classes, temperature) -> None:
    """In forward twice where they are nearly alike, as at a high temperature: the second time from the cache."""
    logits, teacher = random(2, rows, classes).bfloat16()
    times = 1 if temperature == 1 else 2
    loss, lse, teacher_lse = ops.op("emulated", "distillation_forward")(logits, teacher, temperature)
    forward = counted("distillation_forward", logits, teacher, temperature)
    backward = counted("distillation_backward", loss, logits, lse, teacher, teacher_lse, temperature)
    of_logits = rows * classes * 2 // SECTOR
    assert sectors(forward) == (times * 2 * of_logits, 3 * rows)
    assert sectors(backward) == (2 * of_logits + 3 * rows * warps_of_a_row(backward, rows), of_logits)


def test_rows_are_shared_by_their_length() -> None:
    """A warp or less has a short row; the more threads a long one, the longer it is. (classes, threads)"""
    for classes, threads in ((1, 1), (3, 4), (20, 32), (1000, 32), (2048, 32), (4096, 128), (50_257, 512)):
        logits = torch.zeros(300, classes).half()
        launch = counted("cross_entropy_forward", logits, *arguments(classes_of(300, classes)))
        groups = max(256 // threads, 1)
        assert (launch["block"], launch["grid"]) == (threads * groups, -(-300 // groups))

"""What the CUDA kernels of softmax move through memory, counted on the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memkern import backends, ops
from tests import emulator
from tests.peak import peak_bytes
from tests.softmax_cases import backward, forward, random

pytestmark = pytest.mark.usefixtures("emulated")


def counted(x: Tensor, dim: int = -1, causal: bool = False, **options) -> list[dict]:
    """The launches of forward and of backward, which are the same over the gradient where that has x's dtype."""
    options = {"dim": dim, "causal": causal, "log": False, "dtype": x.dtype, **options}
    dtype = options["dtype"]
    with emulator.counting() as launches:
        y, _ = forward("emulated", x, **options)
        for_backward = {key: options[key] for key in ("dim", "causal", "log", "dropout", "seed") if key in options}
        backward("emulated", y, y, **for_backward, dtype=x.dtype)
    if dtype == x.dtype:
        with emulator.counting() as again:
            order = (dim % x.dim(), 1.0, causal, options["log"], options.get("dropout", 0.0), options.get("seed"))
            ops.op("emulated", "softmax_backward_")(y.clone(), y, *order)
        assert [again[0][key] for key in ("kernel", "loaded")] == [launches[1][key] for key in ("kernel", "loaded")]
    return launches


def each(names: str, forward: float, backward: float) -> dict[str, float]:
    """What the kernels of that family move."""
    return {f"forward_{names}": forward, f"backward_{names}": backward}


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(("rows", "width"), [(70, 64), (9, 256), (5, 1024), (3, 4096), (2, 16_384)])
def test_rows_are_read_once(rows, width, dtype) -> None:
    """4 and 6 bytes an element in 16 bit: x; y, dy."""
    x, size = random(rows, width).to(dtype), dtype.itemsize
    for log in (False, True):
        assert emulator.bytes_moved(counted(x, log=log), x.numel()) == each("rows", 2 * size, 3 * size)


def test_long_rows_are_read_twice() -> None:
    for width in (16_416, 40_000):
        x = random(2, width).bfloat16()
        assert emulator.bytes_moved(counted(x), x.numel()) == each("rows_looped", 6, 10)
    for width, times in ((8191, 1), (8193, 2)):  # not aligned
        assert counted(random(1, width).half())[0]["loaded"]["bytes"] == 2 * width * times


def test_conversion_is_fused() -> None:
    for width in (64, 1024, 8192):
        x = random(3, width).bfloat16()
        assert emulator.bytes_moved(counted(x, dtype=torch.float32), x.numel()) == each("rows", 2 + 4, 4 + 4 + 2)


def test_dropout_stores_one_tensor_more_and_reads_no_mask() -> None:
    x, seed = random(4, 1024).bfloat16(), torch.tensor(1)
    assert emulator.bytes_moved(counted(x, dropout=0.1, seed=seed), x.numel()) == each("rows", 6, 6)


@pytest.mark.parametrize("width", (256, 1024, 4096))
def test_masks_are_read_once_a_row_and_never_copied(width) -> None:
    x = random(2, 3, 4, width).bfloat16()
    for kind, size in ((torch.bool, 1), (torch.bfloat16, 2), (torch.float16, 2)):
        for shape in ((2, 1, 4, width), (2, 1, 1, width), (width,)):
            mask = (random(*shape) > 1).to(kind)
            (launch,) = counted(x, mask=mask)[:1]
            assert emulator.bytes_moved([launch], x.numel()) == {"forward_rows": 4 + size}
    for mask in (torch.zeros(2, 1, 4, width), torch.zeros(4, 1, dtype=torch.bool)):  # too wide, or too narrow, for x
        loaded = counted(x, mask=mask)[0]["loaded"]["bytes"]
        assert loaded == (2 + mask.element_size()) * x.numel()


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (64, 1024), (1024, 512), (2, 32_768)])
def test_causal_rows_are_read_as_far_as_they_are_seen(queries, keys) -> None:
    """3 and 4 bytes an element on average of a square, in 16 bit; the mask likewise."""
    x = random(queries, keys).half()
    live = [max(query + 1 + keys - queries, 0) for query in range(queries)]
    times = 1 if keys <= 16_384 else 2
    seen = times * 32 * sum((2 * keys_seen + 31) // 32 for keys_seen in live) / x.numel()
    of_mask = times * 32 * sum((keys_seen + 31) // 32 for keys_seen in live) / x.numel()
    moved = list(emulator.bytes_moved(counted(x, causal=True, mask=torch.zeros(keys) > 0), x.numel()).values())
    assert moved == pytest.approx([2 + seen + of_mask, 2 + 2 * seen])
    if queries == keys:
        plain = list(emulator.bytes_moved(counted(x, causal=True), x.numel()).values())
        assert plain == pytest.approx([3, 4], rel=0.05)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 512), (5, 64, 64), (1, 1024, 32), (3, 17, 16), (40, 2, 48)], ids=str)
def test_inner_dimensions_are_read_once_and_not_transposed(shape, dtype) -> None:
    x, size = random(*shape).to(dtype), dtype.itemsize
    assert emulator.bytes_moved(counted(x, dim=1), x.numel()) == each("inner", 2 * size, 3 * size)


def test_long_inner_dimensions_are_read_twice() -> None:
    for n in (1025, 5000):
        x = random(n, 64).bfloat16()
        assert emulator.bytes_moved(counted(x, dim=0), x.numel()) == each("inner_looped", 6, 10)


@pytest.mark.parametrize("name", ("cpu", "triton"))
def test_inner_dimensions_are_not_transposed_elsewhere(name) -> None:
    if reason := backends.unavailable(name):
        pytest.skip(f"{name}: {reason}")
    x = random(3, 200, 64).bfloat16()
    y, _ = forward(name, x, dim=1)
    for f in (lambda: forward(name, x, dim=1), lambda: backward(name, x, y, dim=1)):
        assert peak_bytes(f) < 1.2 * x.nbytes  # the result


def test_inner_conversion_is_fused() -> None:
    x = random(100, 64).half()
    assert emulator.bytes_moved(counted(x, dim=0, dtype=torch.float32), x.numel()) == each("inner", 2 + 4, 4 + 4 + 2)


def test_unaligned_rows_move_no_more_bytes() -> None:
    for x, dim in ((random(5, 1025), 1), (random(2, 7000), 1), (random(130, 33), 0), (random(65)[1:].view(2, 32), 1)):
        x = x.half()
        forward, backward = counted(x, dim)
        assert (forward["loaded"]["bytes"], forward["stored"]["bytes"]) == (2 * x.numel(), 2 * x.numel())
        assert (backward["loaded"]["bytes"], backward["stored"]["bytes"]) == (4 * x.numel(), 2 * x.numel())


def test_short_rows_share_a_block() -> None:
    for width, rows_of_a_block in ((8, 256), (64, 32), (256, 8), (1024, 8), (2048, 4), (4096, 2), (16_384, 1)):
        launches = counted(torch.zeros(2 * rows_of_a_block + 1, width).half())
        assert [launch["grid"] for launch in launches] == [3, 3]

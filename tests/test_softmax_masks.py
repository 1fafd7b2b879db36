"""Masks and causal masking of the softmax ops on every backend."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.layouts import LAYOUTS, laid_out
from tests.softmax_cases import (
    INF,
    assert_gradient,
    assert_log_probabilities,
    assert_probabilities,
    backward,
    exact_forward,
    forward,
    live_keys,
    random,
)


@pytest.mark.parametrize("how", ("-inf in x", "bool mask", "additive mask"))
@pytest.mark.parametrize("where", ("first", "last"))
def test_finite_entries_in_one_slice_only(backend, device, where, how) -> None:
    """All other threads, warps and blocks of a row see nothing but -inf: they have weight 0, and make no NaN."""
    for width, count in itertools.product((40, 1000, 1024, 3000, 4096, 16384, 70_000), (1, 9)):
        x = random(2, width).to(device, torch.bfloat16)
        hidden = torch.ones(width, dtype=torch.bool, device=device)
        hidden[slice(0, count) if where == "first" else slice(width - count, width)] = False
        mask = None
        if how == "-inf in x":
            x = x.masked_fill(hidden, -INF)
        else:
            mask = hidden if how == "bool mask" else torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -INF)
        y, _ = forward(backend, x, mask)
        assert_probabilities(y, exact_forward(x, mask))
        dy = random(2, width, seed=1).to(x)
        assert_gradient(backward(backend, dy, y), dy, y)
        if mask is None:
            assert_log_probabilities(forward(backend, x, log=True)[0], exact_forward(x, log=True))


MASKS = {
    "per batch": (2, 1, 1, 1),
    "per key": (40,),
    "padding": (2, 1, 1, 40),
    "queries by keys": (6, 40),
    "per head": (3, 6, 40),
    "in full": (2, 3, 6, 40),
    "per query": (1, 1, 6, 1),
}


@pytest.mark.parametrize("kind", (torch.bool, torch.float16, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", MASKS)
def test_masks(backend, device, shape, kind) -> None:
    for dtype, zero_masked in itertools.product((torch.float16, torch.float32), (False, True)):
        x, dy = random(2, 2, 3, 6, 40).to(device, dtype)
        hidden = (random(*MASKS[shape], seed=2) > 0.3).to(device)
        mask = hidden
        if kind != torch.bool:
            mask = random(*MASKS[shape], seed=3).to(device, kind).masked_fill(hidden, -INF)
        y, _ = forward(backend, x, mask, scale=0.3, zero_masked=zero_masked)
        assert_probabilities(y, exact_forward(x, mask, scale=0.3, zero_masked=zero_masked))
        assert not (y[hidden.expand(y.shape)] > 0).any()
        assert_gradient(backward(backend, dy, y, scale=0.3), dy, y, scale=0.3)


def test_masks_over_wide_rows(backend, device) -> None:
    for width, kind in itertools.product((1025, 4096, 16392, 70_000), (torch.bool, torch.bfloat16, torch.float32)):
        x = random(2, 2, width).to(device, torch.float16)
        hidden = (random(2, 1, width, seed=2) > 0.3).to(device)
        mask = hidden if kind == torch.bool else random(2, 1, width, seed=3).to(device, kind).masked_fill(hidden, -INF)
        for given in (mask, mask[..., :1]):
            y, _ = forward(backend, x, given, scale=0.3, zero_masked=True)
            assert_probabilities(y, exact_forward(x, given, scale=0.3, zero_masked=True))


def test_masks_of_many_dimensions(backend, device) -> None:
    """Broadcast over every other one: more strides than the kernels count in."""
    x = random(2, 3, 2, 3, 2, 3, 16).to(device, torch.bfloat16)
    for mask in ((random(2, 1, 2, 1, 2, 1, 16) > 0.5).to(device), random(1, 3, 1, 3, 1, 3, 1).to(x)):
        y, _ = forward(backend, x, mask)
        assert_probabilities(y, exact_forward(x, mask))


def test_large_additive_masks(backend, device) -> None:
    """Of a row that -10000 hides as a whole, x decides; the least number hides, too."""
    for dtype in (torch.float16, torch.float32):
        x = torch.tensor([[1.0, 2.0, 3.0], [-20000.0, -30000.0, 0.0]], device=device, dtype=dtype)
        masks = torch.tensor([[-1e4, -1e4, -1e4], [0.0, 1.0, -INF]], device=device)
        y, _ = forward(backend, x, masks, scale=0.1)
        assert_probabilities(y, exact_forward(x, masks, scale=0.1))
    least = torch.full((3,), torch.finfo(torch.float32).min, device=device)
    least[1] = 0
    assert torch.equal(forward(backend, x[:1], least)[0].cpu(), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_layouts(backend, device, layout) -> None:
    x = random(4, 3, 40).to(device, torch.bfloat16)
    for mask in ((random(4, 3, 40, seed=2) > 0).to(device), random(4, 3, 40, seed=2).to(device, torch.bfloat16)):
        if layout in ("every second", "gaps between rows") and mask.dtype == torch.bool:
            continue  # these layouts put NaN beside
        given = laid_out(mask, layout)
        y, _ = forward(backend, x, given)
        assert_probabilities(y, exact_forward(x, given))
        assert torch.equal(y, forward(backend, x, given.contiguous())[0])


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (6, 1), (5, 130), (130, 5), (33, 65), (3, 4100)], ids=str)
def test_causal(backend, device, shape) -> None:
    """Aligned at the last query and key; what a query does not see is not read, nor is its gradient."""
    live = live_keys(torch.empty(shape)).to(device)
    sees_some = live.any(-1)
    for dtype, zero_masked in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        x, dy = random(2, 2, *shape).to(device, dtype)
        mask = random(*shape, seed=2).to(device, dtype)
        for given in (None, mask, mask > 0.7):
            exact = exact_forward(x, given, scale=0.5, causal=True, zero_masked=zero_masked)
            hidden_x, hidden_dy = (torch.where(live, t, torch.nan) for t in (x, dy))
            y, _ = forward(backend, hidden_x, given, scale=0.5, causal=True, zero_masked=zero_masked)
            assert_probabilities(y, exact)  # a row of which all that is seen is masked is NaN as a whole
            assert y[:, ~sees_some].eq(0).all() if zero_masked else y[:, ~sees_some].isnan().all()
            dx = backward(backend, hidden_dy, y, scale=0.5, causal=True)
            assert dx.masked_select(~live).eq(0).all()
            kept = torch.where(live, y, 0), torch.where(live, dy, 0)
            assert_gradient(dx, kept[1], kept[0], scale=0.5)


def test_causal_rows_beside_a_nan(backend, device) -> None:
    x = random(4, 4).to(device)
    x[2, 1] = torch.nan
    y, _ = forward(backend, x, causal=True)
    assert y[2, :3].isnan().all() and y[2, 3] == 0 and y[[0, 1, 3]].isfinite().all()


def test_index_arithmetic_beyond_32_bits(tmp_path) -> None:
    """Where a row of a mask starts, how many keys a query sees, and the divisions in that, of any size."""
    compiler = shutil.which("g++") or pytest.skip("no g++ here")
    source, program = Path(__file__).with_name("softmax_check.cpp"), tmp_path / "softmax_check"
    torch_dir = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
    libraries = [f"-L{torch_dir}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_dir}/lib"]
    command = [compiler, *flags, "-isystem", torch_dir / "include", source, "-o", program, *libraries]
    subprocess.run(command, check=True)
    check = subprocess.run([program], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout

"""A tensor of more than 2^31 elements: the last ones are checked and updated like the others."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from memkern import ops

N = 2**31 + 9


def test_more_than_2_to_the_31_elements(backend, device) -> None:
    if device != "cuda" or torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip(f"{backend} on {device}: needs a GPU with 20 GiB free")
    p, g, m = (torch.full((N,), value, dtype=torch.bfloat16, device=device) for value in (1.0, 0.25, 0.0))
    found, norm, _ = ops.op(backend, "check_and_norm")([g], None, math.inf).tolist()
    assert found == 0 and norm == pytest.approx(0.25 * math.sqrt(N), rel=1e-5)
    ops.op(backend, "lion_step")([p], [g], [m], [], None, None, None, None, 0.25, 0.5, 0.5, 0.0, False, False)
    for part in (slice(0, 9), slice(2**31 - 5, 2**31 + 5), slice(N - 9, N)):
        assert (p[part] == 0.75).all() and (m[part] == 0.125).all()
    g[N - 1] = math.inf
    assert ops.op(backend, "check_and_norm")([g], None, math.inf)[0] == 1


def test_a_check_of_more_than_2_to_the_31_elements_on_the_cpu(backend) -> None:
    """Pages of zeros that nobody has written are one and the same in memory."""
    if backend != "cpu":
        pytest.skip(f"{backend}: the others take copies, or minutes")
    try:
        pages = mmap.mmap(-1, 2 * N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        pytest.skip(f"no 4 GiB of addresses: {error}")
    g = torch.frombuffer(pages, dtype=torch.bfloat16)
    g[-9:] = 2.0
    assert ops.op(backend, "check_and_norm")([g], None, 3.0).tolist() == pytest.approx([0, 6, 0.5], rel=1e-6)
    g[-1] = math.inf
    assert ops.op(backend, "check_and_norm")([g], None, math.inf)[0] == 1

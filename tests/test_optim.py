"""The optimizer ops of every backend, against the formulas in fp64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from memkern import ops
from tests.optim_steps import (
    ALGORITHMS,
    BF16,
    DTYPES,
    FP32,
    FP64,
    HALF,
    SIZES,
    Algorithm,
    Dtypes,
    Tensors,
    check_step,
    needs,
    on,
)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return ALGORITHMS[request.param]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_against_fp64(backend: str, device: str, algorithm: Algorithm, dtypes: Dtypes) -> None:
    check_step(backend, device, algorithm, dtypes)


def test_options(backend: str, device: str, algorithm: Algorithm) -> None:
    """Scale, clip, maximize and write-back, one by one and together; a scale that is no power of two."""
    dtypes = DTYPES[0]
    check_step(backend, device, algorithm, dtypes, maximize=True)
    check_step(backend, device, algorithm, dtypes, clip=0.37)
    check_step(backend, device, algorithm, dtypes, grad_scale=65536.0)
    check_step(backend, device, algorithm, dtypes, grad_scale=1000.0, write_grads=True)
    check_step(backend, device, algorithm, dtypes, grad_scale=512.0, clip=0.37, maximize=True, write_grads=True)
    check_step(backend, device, algorithm, dtypes, write_grads=True)  # without a scale there is nothing to write
    check_step(backend, device, algorithm, DTYPES[6], grad_scale=1024.0, clip=0.37)


def test_first_step(backend: str, device: str, algorithm: Algorithm) -> None:
    t = Tensors.random(algorithm, DTYPES[0], device, step=1.0)
    for state in sum(t.states, []):
        state.zero_()
    check_step(backend, device, algorithm, DTYPES[0], t)


@pytest.mark.parametrize("dtypes", (DTYPES[0], DTYPES[6]), ids=str)
def test_several_chunks(backend: str, device: str, algorithm: Algorithm, dtypes: Dtypes) -> None:
    """Of 8192 elements on a GPU, 16384 on the CPU. LAMB's norms are over all of them."""
    t = Tensors.random(algorithm, dtypes, device, sizes=(5, 20_001, 16_400))
    check_step(backend, device, algorithm, dtypes, t)


def test_many_steps_count_on(backend: str, device: str) -> None:
    """1 - beta^t stays right for large t."""
    for step in (10.0, 1e3, 1e6, 2.0**24):
        t = Tensors.random(ALGORITHMS["adamw"], DTYPES[0], device, step=step)
        check_step(backend, device, ALGORITHMS["adamw"], DTYPES[0], t)


def test_mixed_dtypes_in_one_call(backend: str, device: str, algorithm: Algorithm) -> None:
    for master in (False, True):
        mixed = [d for d in DTYPES if d.master == master and d.param != FP64]
        parts = [Tensors.random(algorithm, d, device, sizes=(33, 0)) for d in mixed]
        together = Tensors(
            *(sum((getattr(part, name) for part in parts), []) for name in ("params", "grads")),
            [sum((part.states[k] for part in parts), []) for k in range(algorithm.states)],
            *(sum((getattr(part, name) for part in parts), []) for name in ("masters", "steps")),
        )
        together.run(backend, algorithm)
        for part, dtypes in zip(copy.deepcopy(parts), mixed, strict=True):
            again = Tensors.random(algorithm, dtypes, device, sizes=(33, 0))
            check_step(backend, device, algorithm, dtypes, again)
            assert all(torch.equal(a, b) for a, b in zip(part.all(), again.all(), strict=True))


@pytest.mark.parametrize("dtypes", (DTYPES[0], DTYPES[5], DTYPES[7]), ids=str)
def test_alignment_and_offsets(backend: str, device: str, algorithm: Algorithm, dtypes: Dtypes) -> None:
    """Every pointer at each distance from a 16-byte boundary: all at one, and each at another."""
    for same in (True, False):
        t = Tensors.random(algorithm, dtypes, device, sizes=[41] * 9)

        def moved(tensors: list[Tensor], number: int, same: bool = same) -> list[Tensor]:
            moved = []
            for i, x in enumerate(tensors):
                offset = i if same else (i * number) % 9
                moved.append(
                    torch.cat([x.new_full((offset,), math.nan), x, x.new_full((3,), math.nan)])[offset : offset + 41]
                )
            return moved

        t.params, t.grads, t.masters = moved(t.params, 1), moved(t.grads, 2), moved(t.masters, 4)
        t.states = [moved(state, 5 + k) for k, state in enumerate(t.states)]
        check_step(backend, device, algorithm, dtypes, t)
        for x in (*t.params, *t.grads, *t.masters, *sum(t.states, [])):
            around = torch.as_strided(x, (x.storage_offset() + 44,), (1,), 0)
            assert around.isnan().sum() == x.storage_offset() + 3  # nothing outside was written


@pytest.mark.exhaustive
def test_thousands_of_tiny_tensors(backend: str, device: str) -> None:
    """The arguments of a CUDA launch hold some 430 parameters of a step, and some 1170 gradients."""
    # Triton's interpreter takes 10 ms a tensor, and a table has no length at which it changes.
    fewer = {"emulated": 4, "triton": 20}.get(backend, 1) if device == "cpu" else 1
    for name in ("adamw", "lamb"):
        t = Tensors.random(ALGORITHMS[name], DTYPES[0], device, sizes=[1 + i % 3 for i in range(2000 // fewer)])
        check_step(backend, device, ALGORITHMS[name], DTYPES[0], t)
    grads = [torch.full((1 + i % 3,), 2.0, device=device) for i in range(5000 // fewer)]
    norm = ops.op(backend, "check_and_norm")(grads, None, math.inf)[1]
    assert float(norm) == pytest.approx(math.sqrt(4 * sum(map(torch.numel, grads))), rel=1e-6)
    grads[-1][0] = math.inf
    assert ops.op(backend, "check_and_norm")(grads, None, math.inf)[0] == 1


@pytest.mark.parametrize("found", (1.0, 2.0, -1.0, math.inf, math.nan))
def test_a_skip_changes_no_bit(backend: str, device: str, algorithm: Algorithm, found: float) -> None:
    """T1: any found_inf but 0 is a skip; two GPUs that each found one make it 2."""
    for dtypes in (DTYPES[0], DTYPES[5]):
        t = Tensors.random(algorithm, dtypes, device)
        t.grads[0].fill_(math.inf)
        t.params[3][0] = math.nan
        before = copy.deepcopy(t)
        t.run(backend, algorithm, found_inf=on(device, found), grad_scale=on(device, 2.0), write_grads=True)
        same = [torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(t.all(), before.all(), strict=True)]
        assert all(same)
        t.grads[0].fill_(1.0)
        t.run(backend, algorithm, found_inf=on(device, 0.0))
        assert not torch.equal(t.params[3], before.params[3])


def test_lr_from_a_tensor(backend: str, device: str, algorithm: Algorithm) -> None:
    by_number, by_tensor = (Tensors.random(algorithm, DTYPES[0], device) for _ in range(2))
    by_number.run(backend, algorithm, lr=0.25)
    by_tensor.run(backend, algorithm, lr=77.0, lr_tensor=on(device, 0.25))
    assert all(torch.equal(a, b) for a, b in zip(by_number.all(), by_tensor.all(), strict=True))


def test_zero_gradients_and_parameters(backend: str, device: str, algorithm: Algorithm) -> None:
    """LAMB's ratio is 1 where a norm is 0; T14: no division by a zero that eps was rounded to."""
    for dtypes in (DTYPES[0], DTYPES[8]):
        for zeros in (("grads", "states"), ("params", "masters"), ("grads", "states", "params", "masters")):
            t = Tensors.random(algorithm, dtypes, device, step=1.0)
            for name in zeros:
                for x in getattr(t, name) if name != "states" else sum(t.states, []):
                    x.zero_()
            check_step(backend, device, algorithm, dtypes, t)


# ---- check_and_norm


@pytest.mark.parametrize("dtype", (HALF, BF16, FP32, FP64), ids=str)
@pytest.mark.parametrize("scale", (None, 1024.0, 1000.0))
def test_norm(backend: str, device: str, dtype: torch.dtype, scale: float | None) -> None:
    needs(backend, Dtypes(dtype, dtype, dtype))
    torch.manual_seed(0)
    grads = [torch.randn(n).to(dtype).to(device) for n in (*SIZES, 70_001)]
    exact = torch.cat([g.cpu().double() for g in grads]).norm() / (scale or 1.0)
    for max_norm in (0.01, 1e6, math.inf):
        result = ops.op(backend, "check_and_norm")(grads, on(device, scale) if scale else None, max_norm)
        assert result.shape == (3,) and result.dtype == FP32
        found, norm, clip = result.tolist()
        assert found == 0
        assert norm == pytest.approx(float(exact), rel=1e-6)
        assert clip == pytest.approx(min(1.0, max_norm / (float(exact) + 1e-6)), rel=1e-6)
    again = ops.op(backend, "check_and_norm")(grads, on(device, scale) if scale else None, max_norm)
    assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", (HALF, BF16, FP32), ids=str)
def test_finds_whatever_is_not_finite(backend: str, device: str, dtype: torch.dtype) -> None:
    """Anywhere: in the first and last element, at the borders of chunks and of vectors, behind an unaligned start."""
    n = 33_000
    for bad in (math.inf, -math.inf, math.nan):
        for place in (0, 1, 3, 7, 8, 16_383, 16_384, 16_391, 32_767, n - 2, n - 1) if bad == math.nan else (5, n - 1):
            grad = torch.zeros(n + 1, dtype=dtype, device=device)[1:]
            assert ops.op(backend, "check_and_norm")([grad[:3], grad], None, 1.0)[0] == 0
            grad[place] = bad
            assert ops.op(backend, "check_and_norm")([grad[:0], grad], None, 1.0)[0] == 1


@pytest.mark.parametrize(
    ("value", "scale", "found"),
    (
        (1e10, 2.0**-120, 1),  # T8: finite, and infinite when unscaled
        (1.0, 0.0, 1),  # T9: a scale backed off to nothing
        (0.0, 0.0, 1),
        (1.0, math.inf, 1),
        (1.0, math.nan, 1),
        (1.0, 2.0**-120, 0),
        (1.0, 2.0**120, 0),
    ),
)
def test_finite_after_unscaling(backend: str, device: str, value: float, scale: float, found: int) -> None:
    grads = [torch.full((5,), value, device=device)]
    assert ops.op(backend, "check_and_norm")(grads, on(device, scale), math.inf)[0] == found


def test_no_elements_at_all(backend: str, device: str) -> None:
    grads = [torch.zeros(0, device=device), torch.zeros(3, 0, device=device)]
    assert ops.op(backend, "check_and_norm")(grads, None, 1.0).tolist() == [0, 0, 1]
    t = Tensors.random(ALGORITHMS["adamw"], DTYPES[0], device, sizes=(0, 0))
    t.run(backend, ALGORITHMS["adamw"])
    t = Tensors.random(ALGORITHMS["lamb"], DTYPES[0], device, sizes=(0,))
    t.run(backend, ALGORITHMS["lamb"])


def test_norm_of_long_vectors_and_of_large_values(backend: str, device: str) -> None:
    grads = [torch.full((300_000,), 1 / 3, device=device)]
    assert float(ops.op(backend, "check_and_norm")(grads, None, 1.0)[1]) == pytest.approx(
        math.sqrt(300_000) * float(grads[0][0]), rel=1e-6
    )
    grads = [torch.full((100,), 1e18, device=device)]
    assert float(ops.op(backend, "check_and_norm")(grads, None, 1.0)[1]) == pytest.approx(1e19, rel=1e-6)


# ---- advance


def test_advance(backend: str, device: str) -> None:
    steps = [torch.tensor(float(i), device=device) for i in range(5)]
    skipped = torch.tensor(7, device=device)
    advance = ops.op(backend, "advance")
    for found, taken in ((None, True), (0.0, True), (1.0, False), (2.0, False), (math.nan, False)):
        before, was = [float(step) for step in steps], int(skipped)
        advance(steps, skipped, None if found is None else on(device, found))
        assert [float(step) for step in steps] == [step + taken for step in before]
        assert int(skipped) == was + (not taken)
    advance(steps, None, None)
    advance([], skipped, on(device, 1.0))
    assert int(skipped) == 11 and float(steps[0]) == 3
    many = [torch.zeros((), device=device) for _ in range(4500)]
    advance(many, skipped, on(device, 0.0))
    assert (torch.stack(many) == 1).all()
    advance(many, skipped, on(device, 1.0))  # several launches, one skip
    assert (torch.stack(many) == 1).all() and int(skipped) == 12


def test_opcheck(backend: str, device: str, algorithm: Algorithm) -> None:
    """What an op writes is what its schema says, and it can be traced."""
    t = Tensors.random(algorithm, DTYPES[5], device, sizes=(5, 3))
    found, scale = on(device, 0.0), on(device, 2.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        ops.op(backend, algorithm.op), t.arguments(algorithm, True, True, None, grad_scale=scale), test_utils=checks
    )
    torch.library.opcheck(ops.op(backend, "check_and_norm"), (t.grads, scale, 1.0), test_utils=checks)
    skipped = torch.tensor(0, device=device)
    torch.library.opcheck(ops.op(backend, "advance"), ([on(device, 1.0)], skipped, found), test_utils=checks)

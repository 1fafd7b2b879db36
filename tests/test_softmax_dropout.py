"""Dropout of the softmax ops: the same elements on every backend, from a seed in place of a mask."""

from __future__ import annotations

import pytest
import torch

from memkern import ops
from memkern.reference.softmax import philox
from tests.softmax_cases import assert_gradient, backward, exact_forward, forward, live_keys, random, wide
from tests.ulp import spacing


def test_philox_known_answers() -> None:
    """Of the authors' Random123, kat_vectors."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for numbers, answer in (
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        given = tuple(torch.tensor(number) for number in numbers)
        assert tuple(int(number) for number in philox(given[:4], given[4:])) == answer


SEEDS = (0, 1, -1, 2**62 + 12345, -(2**63), 0x123456789ABCDEF)


@pytest.mark.parametrize("options", ({}, {"causal": True, "zero_masked": True}, {"dim": 1}), ids=str)
def test_dropout_is_the_same_everywhere(backend, device, options) -> None:
    """Which elements go is the reference's decision, from the seed and the element's place alone."""
    for width, seed in zip((1, 5, 64, 257, 1026, 16393), SEEDS, strict=True):
        x, dy = random(2, 3, 5, width).to(device)
        given = torch.tensor(seed, device=device)
        y, dropped = forward(backend, x, dropout=0.3, seed=given, **options)
        kept = forward("reference", torch.zeros_like(x), dropout=0.3, seed=given)[1] > 0
        assert torch.equal(y, forward(backend, x, **options)[0])
        torch.testing.assert_close(dropped, torch.where(kept, y / 0.7, 0))
        dim, causal = options.get("dim", 2), "causal" in options
        dx = backward(backend, dy, y, dim, 0.5, causal, dropout=0.3, seed=given)
        dp = torch.where(kept, dy.double() / 0.7, 0)
        dp = torch.where(live_keys(x).to(device), dp, 0) if causal else dp
        assert_gradient(dx, dp, y, dim, scale=0.5)
        again = dy.clone()
        ops.op(backend, "softmax_backward_")(again, y, dim, 0.5, causal, False, 0.3, given)
        assert torch.equal(again, dx)


def test_dropout_keeps_what_it_says(backend, device) -> None:
    x = torch.zeros(64, 1024, device=device).half()
    for dropout in (0.1, 0.5, 0.9):
        kept = []
        for seed in (1, 2):
            _, dropped = forward(backend, x, dropout=dropout, seed=torch.tensor(seed, device=device))
            kept.append(dropped > 0)
            share = kept[-1].double().mean()
            assert abs(share - (1 - dropout)) < 5 * (dropout * (1 - dropout) / x.numel()) ** 0.5
            assert (wide(dropped)[kept[-1].cpu()] - 2**-10 / (1 - dropout)).abs().max() <= 2.0**-20
        both = (kept[0] & kept[1]).double().mean()
        assert abs(both - (1 - dropout) ** 2) < 0.01


def test_dropout_in_16_bits_is_rounded_once(backend, device) -> None:
    x = random(4, 300).to(device, torch.bfloat16)
    seed = torch.tensor(3, device=device)
    _, dropped = forward(backend, x, dropout=0.1, seed=seed)
    exact = exact_forward(x) / 0.9
    kept = wide(dropped) > 0
    error = (wide(dropped) - exact).abs() / spacing(exact, torch.bfloat16)
    assert 0.8 < kept.double().mean() < 1 and error[kept].max() <= 0.51
    to_fp32, wider = forward(backend, x, dropout=0.1, seed=seed, dtype=torch.float32)
    torch.testing.assert_close(wider[wider > 0], to_fp32[wider > 0] / 0.9)

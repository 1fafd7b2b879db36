"""Softmax and log-softmax in plain PyTorch, and the random numbers of dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memkern.ops import check_like
from memkern.reference.common import wide

# Over a row, with z = scale x + mask:  y = exp(z - m) / sum exp(z - m),  log-softmax  z - m - log sum exp(z - m),
# m the largest z. As dy_i / dz_j = y_i (delta_ij - y_j), or delta_ij - exp(y_j) for log-softmax,
#   dz = y (dy - sum(dy y)),  or  dy - exp(y) sum(dy),  and  dx = scale dz,  dmask = dz.
# Dropout multiplies y by 1 / (1 - dropout) where an element is kept and by 0 elsewhere, and then dy, too.


def _dead(x: Tensor) -> Tensor:
    """Which keys a query does not see under causal masking, aligned at the last query and key; of x's last shape."""
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)


def softmax_forward(x, mask, dim, scale, causal, log, zero_masked, dropout, seed, dtype):
    if log and (mask is not None or causal or dropout > 0):
        raise ValueError("log: log-softmax takes no mask, causal or dropout")
    z = wide(x) * scale
    if mask is not None:
        z = z.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else z + wide(mask)
    if causal:
        dead = _dead(x)
        z = z.masked_fill(dead, -math.inf)
    y = torch.log_softmax(z, dim) if log else torch.softmax(z, dim)
    masked = (z == -math.inf).all(dim, keepdim=True)
    if causal:  # 0 also beside a NaN
        y = y.masked_fill(dead & ~masked, 0)
    if zero_masked:
        y = y.masked_fill(masked, 0)
    dropped = apply_dropout(y, dropout, seed) if dropout > 0 else y.new_empty(0)
    return y.to(dtype).contiguous(), dropped.to(dtype).contiguous()


def softmax_backward(dy, y, dim, scale, causal, log, dropout, seed, dtype):
    check_like("dy", dy, y, of="y")
    g, p = wide(dy), wide(y)
    if dropout > 0:
        g = apply_dropout(g, dropout, seed)
    if causal:
        g, p = (t.masked_fill(_dead(y), 0) for t in (g, p))
    dz = g - p.exp() * g.sum(dim, keepdim=True) if log else p * (g - (g * p).sum(dim, keepdim=True))
    return (scale * dz).to(dtype).contiguous()


def softmax_backward_(dy, y, dim, scale, causal, log, dropout, seed):
    dy.copy_(softmax_backward(dy, y, dim, scale, causal, log, dropout, seed, dy.dtype))


LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four numbers below 2^32 (int64) from four and a key of two.

    Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        # int64 wraps modulo 2^64, so both halves of a product are right.
        ac, cc = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (cc >> 32 & LOW) ^ b ^ first, cc & LOW, (ac >> 32 & LOW) ^ d ^ second, ac & LOW
        first, second = first + 0x9E3779B9 & LOW, second + 0xBB67AE85 & LOW
    return a, b, c, d


def apply_dropout(value: Tensor, dropout: float, seed: Tensor, first: int = 0) -> Tensor:
    """``value`` after dropout. Element i of it, in memory order, takes number (first + i) % 4 of counter that // 4."""
    end = first + value.numel()
    block = torch.arange(first // 4, (end + 3) // 4, device=value.device)
    none = torch.zeros_like(block)
    numbers = torch.stack(philox((block & LOW, block >> 32, none, none), (seed & LOW, seed >> 32 & LOW)), -1)
    before = first // 4 * 4
    keep = numbers.flatten()[first - before : end - before].view(value.shape) >= math.floor(dropout * 2**32)
    return torch.where(keep, value / (1 - dropout), 0)


IMPLEMENTATIONS = {
    "softmax_forward": softmax_forward,
    "softmax_backward": softmax_backward,
    "softmax_backward_": softmax_backward_,
}

"""GELU in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memkern.ops import check_like
from memkern.reference.common import stored_like, wide

# GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), written so that nothing cancels: with t = |x| and
# Q(t) the weight of the far side, gelu(x) = max(x, 0) - t Q(t), and gelu'(t) = 1 - gelu'(-t).
#   none: Q(t) = 1 - Phi(t) = erfc(t / sqrt 2) / 2
#   tanh: Q(t) = sigmoid(-v(t)),  v(t) = 2 sqrt(2/pi) (t + 0.044715 t^3),
#         since 1 + tanh(u) = 2 sigmoid(2u)
# t stops at 40, where Q is 0 in every dtype: beyond, infinity times 0 would make a NaN.
FAR = 40.0
SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715


def _far_side(t: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Q(t) and -Q'(t)."""
    if approximate == "tanh":
        q = torch.sigmoid(-SLOPE * (t + CUBIC * t**3))
        return q, q * (1 - q) * SLOPE * (1 + 3 * CUBIC * t**2)
    return torch.erfc(t / math.sqrt(2)) / 2, torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def gelu_forward(x: Tensor, approximate: str) -> Tensor:
    w = wide(x)
    t = w.abs().clamp(max=FAR)
    return stored_like(x, w.clamp(min=0) - t * _far_side(t, approximate)[0])


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    check_like("dy", dy, x)
    w = wide(x)
    t = w.abs().clamp(max=FAR)
    q, slope = _far_side(t, approximate)
    negative = q - t * slope
    return stored_like(x, wide(dy) * torch.where(w < 0, negative, 1 - negative))


def gelu_second_derivative(x: Tensor, approximate: str) -> Tensor:
    """gelu''(x), an even function, in plain differentiable operations (for double backward)."""
    t = wide(x).abs().clamp(max=FAR)
    q, slope = _far_side(t, approximate)
    if approximate == "tanh":
        # q' = -q (1-q) v', so (t q)'' = 2 q' + t q'' with q'' = q (1-q) ((1-2q) v'^2 - v'')
        v1 = SLOPE * (1 + 3 * CUBIC * t**2)
        v2 = SLOPE * 6 * CUBIC * t
        return 2 * slope - t * q * (1 - q) * ((1 - 2 * q) * v1**2 - v2)
    return (2 - t * t) * slope


IMPLEMENTATIONS = {"gelu_forward": gelu_forward, "gelu_backward": gelu_backward}

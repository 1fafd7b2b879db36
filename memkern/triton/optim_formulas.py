"""The optimizers' formulas in Triton, as csrc/optim.h has them.

An algorithm is a pair of functions. ``scalars``: what a whole tensor shares, from the op's numbers (in the order of
its schema, from a place in the table on), in fp64: 1 - beta^t cancels where beta^t is near 1. ``update``: weight and
states from weight, gradient and states; those that an algorithm does not have pass through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from memkern.triton.multi_tensor import number


@triton.jit
def _one_minus_power(base, t):
    """1 - base^t in fp64, for a whole number t: there is no pow without libdevice."""
    power = tl.full((), 1.0, tl.float64)
    left = t.to(tl.int64)
    while left > 0:
        power = tl.where(left % 2 == 1, power * base, power)
        base = base * base
        left = left // 2
    return 1.0 - power


@triton.jit
def _moments(m_rate, v_keep, v_rate, g, m, v):
    return m + m_rate * (g - m), v_keep * v + v_rate * g * g


@triton.jit
def adam_scalars(numbers, lr, t):
    beta1, beta2, decay, decoupled = number(numbers), number(numbers + 1), number(numbers + 3), number(numbers + 4)
    shrink, l2 = 1.0 - lr * decay * decoupled, decay * (1.0 - decoupled)
    v_root, size = tl.sqrt(_one_minus_power(beta2, t)), lr / _one_minus_power(beta1, t)
    return shrink, l2, 1.0 - beta1, beta2, 1.0 - beta2, v_root, number(numbers + 2), size


@triton.jit
def amsgrad_update(s, w, g, m, v, top, AMSGRAD: tl.constexpr = True):
    shrink, l2, m_rate, v_keep, v_rate, v_root, eps, size = s
    g = tl.where(l2 != 0.0, g + l2 * w, g)
    m, v = _moments(m_rate, v_keep, v_rate, g, m, v)
    top = tl.where(top > v, top, v) if AMSGRAD else v
    return w * shrink - tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(top), v_root) + eps), m, v, top


@triton.jit
def adam_update(s, w, g, m, v, top):
    return amsgrad_update(s, w, g, m, v, top, AMSGRAD=False)


@triton.jit
def sgd_scalars(numbers, lr, t):
    """The first step fills the buffer with the gradient, undampened."""
    momentum, nesterov = number(numbers), number(numbers + 3)
    keep = tl.where(t == 1.0, 0.0, momentum)
    rate = tl.where(t == 1.0, 1.0, 1.0 - number(numbers + 1))
    return lr, number(numbers + 2), keep, rate, nesterov, tl.where(nesterov != 0.0, momentum, 1.0)


@triton.jit
def momentum_update(s, w, g, b, unused, unused_too, MOMENTUM: tl.constexpr = True):
    lr, decay, keep, rate, ahead, along = s
    g = tl.where(decay != 0.0, g + decay * w, g)
    if MOMENTUM:
        b = tl.where(keep != 0.0, keep * b + rate * g, g)
        g = ahead * g + along * b
    return w - lr * g, b, unused, unused_too


@triton.jit
def sgd_update(s, w, g, unused, unused_too, nor_this):
    return momentum_update(s, w, g, unused, unused_too, nor_this, MOMENTUM=False)


@triton.jit
def lamb_scalars(numbers, lr, t):
    beta1, beta2 = number(numbers), number(numbers + 1)
    m_unbias, v_root = 1.0 / _one_minus_power(beta1, t), tl.sqrt(_one_minus_power(beta2, t))
    return lr, 1.0 - beta1, m_unbias, beta2, 1.0 - beta2, v_root, number(numbers + 2), number(numbers + 3)


@triton.jit
def lamb_direction(s, w, g, m, v):
    _, m_rate, m_unbias, v_keep, v_rate, v_root, eps, decay = s
    m, v = _moments(m_rate, v_keep, v_rate, g, m, v)
    return tl.div_rn(m_unbias * m, tl.div_rn(tl.sqrt_rn(v), v_root) + eps) + decay * w, m, v


@triton.jit
def lamb_update(s, w, g, m, v, unused):
    u, m, v = lamb_direction(s, w, g, m, v)
    return w - s[0] * u, m, v, unused


@triton.jit
def lion_scalars(numbers, lr, t):
    return lr, 1.0 - lr * number(numbers + 2), 1.0 - number(numbers), 1.0 - number(numbers + 1)


@triton.jit
def lion_update(s, w, g, m, unused, unused_too):
    lr, shrink, look, rate = s
    direction = m + look * (g - m)
    w = w * shrink - tl.where(direction > 0, lr, tl.where(direction < 0, -lr, 0.0))
    return w, m + rate * (g - m), unused, unused_too


ADAM, AMSGRAD = (adam_scalars, adam_update), (adam_scalars, amsgrad_update)
SGD, MOMENTUM = (sgd_scalars, sgd_update), (sgd_scalars, momentum_update)
LAMB, LION = (lamb_scalars, lamb_update), (lion_scalars, lion_update)

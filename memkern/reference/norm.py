"""LayerNorm and RMSNorm in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from memkern.ops import check_like, computed_in, norm_rows
from memkern.reference.common import wide

# LayerNorm (Ba et al. 2016, arXiv:1607.06450): x_hat = (x - mean) rstd, y = x_hat w + b, with the biased
# variance. RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): x_hat = x rstd, y = x_hat w. With g = dy w and
# means over the row,  dx = rstd (g - mean(g) - x_hat mean(g x_hat)),  mean(g) only where x was centred,
# dw = sum over rows of dy x_hat,  db = sum over rows of dy.


def _in_rows(x: Tensor, columns: int) -> Tensor:
    return wide(x).reshape(norm_rows(x, columns), columns)


def _rounded(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).reshape(like.shape).contiguous()


def _normalise(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    columns: int,
    eps: float,
    centre: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, summed, mean and rstd."""
    summed = x.new_empty(0)
    if residual is not None:
        check_like("residual", residual, x)
        x = summed = _rounded(wide(x) + wide(residual), x)
    rows = _in_rows(x, columns)
    mean = rows.mean(1, keepdim=True) if centre else torch.zeros_like(rows[:, :1])
    rstd = ((rows - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    y = (rows - mean) * rstd
    if scale is not None:
        y = y * scale.flatten()
    if bias is not None:
        y = y + wide(bias).flatten()
    statistics = computed_in(x)
    return _rounded(y, x), summed, mean.flatten().to(statistics), rstd.flatten().to(statistics)


def _gradients(
    dy: Tensor,
    dsummed: Tensor | None,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    columns: int,
    from_y: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the wide gradients of the scale and the bias, flat. ``mean`` is None where x was not centred."""
    check_like("dy", dy, x)
    g, x_hat = _in_rows(dy, columns), _in_rows(x, columns)
    if from_y:
        x_hat = x_hat if bias is None else x_hat - wide(bias).flatten()
        x_hat = x_hat if scale is None else x_hat / scale.flatten()
    else:
        x_hat = x_hat if mean is None else x_hat - wide(mean)[:, None]
        x_hat = x_hat * wide(rstd)[:, None]
    dscale, dbias = (g * x_hat).sum(0), g.sum(0)
    g = g if scale is None else g * scale.flatten()
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    if mean is not None:
        dx = dx - g.mean(1, keepdim=True)
    dx = dx * wide(rstd)[:, None]
    if dsummed is not None:
        check_like("dsummed", dsummed, x)
        dx = dx + _in_rows(dsummed, columns)
    return _rounded(dx, x), dscale, dbias


def _if_needed(needed: bool, gradient: Tensor, like: Tensor | None, x: Tensor) -> Tensor:
    return _rounded(gradient, like) if needed else x.new_empty(0)


def _scale(weight: Tensor | None, zero_centred: bool = False) -> Tensor | None:
    return None if weight is None else wide(weight) + zero_centred


def layer_norm_forward(x, residual, weight, bias, columns, eps):
    return _normalise(x, residual, _scale(weight), bias, columns, eps, centre=True)


def layer_norm_backward(dy, dsummed, x, weight, bias, mean, rstd, columns, from_y, need_dx, need_dweight, need_dbias):
    dx, dweight, dbias = _gradients(dy, dsummed, x, _scale(weight), bias, mean, rstd, columns, from_y)
    return (
        _if_needed(need_dx, dx, x, x),
        _if_needed(need_dweight, dweight, weight, x),
        _if_needed(need_dbias, dbias, bias, x),
    )


def rms_norm_forward(x, residual, weight, columns, eps, zero_centred):
    y, summed, _, rstd = _normalise(x, residual, _scale(weight, zero_centred), None, columns, eps, centre=False)
    return y, summed, rstd


def rms_norm_backward(dy, dsummed, x, weight, rstd, columns, zero_centred, from_y, need_dx, need_dweight):
    scale = _scale(weight, zero_centred)
    dx, dweight, _ = _gradients(dy, dsummed, x, scale, None, None, rstd, columns, from_y)
    return _if_needed(need_dx, dx, x, x), _if_needed(need_dweight, dweight, weight, x)


IMPLEMENTATIONS = {
    "layer_norm_forward": layer_norm_forward,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_forward": rms_norm_forward,
    "rms_norm_backward": rms_norm_backward,
}

"""Distance to an exact result, in units of the last place of the dtype that holds it."""

from __future__ import annotations

import torch
from torch import Tensor


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit dtype, infinities and NaNs included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def spacing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring values of ``dtype`` at ``exact`` (fp64), subnormals included."""
    info = torch.finfo(dtype)
    magnitude = exact.abs().clamp(min=info.smallest_normal, max=info.max)
    return info.eps * 2.0 ** (torch.frexp(magnitude).exponent.double() - 1)


def ulp_error(actual: Tensor, exact: Tensor) -> Tensor:
    """|actual - exact| in ulp, where ``exact`` is fp64: 0 for equal infinities or both NaN, infinity for a lone one."""
    dtype, actual, exact = actual.dtype, actual.detach().cpu().double(), exact.detach().cpu()
    error = (actual - exact).abs() / spacing(exact, dtype)
    # A result past the largest value is right as infinity.
    rounded = exact.to(dtype).double()
    same = (actual == rounded) | (actual.isnan() & exact.isnan())
    return torch.where(same, torch.where(actual.isfinite(), error, 0.0), error.nan_to_num(nan=torch.inf))

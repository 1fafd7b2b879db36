"""Softmax and log-softmax, alone or together with scaling, masks and dropout."""

from __future__ import annotations

import math
import numbers
import operator
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from memkern import backends
from memkern.functional.common import AUTOCAST, dense, floating, one_of, torch_dtype
from memkern.functional.reuse import alone, watched
from memkern.functional.softmax_autograd import Plan
from memkern.functional.softmax_autograd import softmax as run

CAUSAL = (None, "square", "bottom_right")
FULLY_MASKED = ("nan", "zero")
MASK_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32)


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    autocast: str = "keep",
) -> Tensor:
    """Softmax, in place of ``torch.nn.functional.softmax``: ``exp(x) / sum(exp(x))`` along a dimension.

    Arithmetic is fp32 (fp64 for fp64), of differences from the largest entry, with one rounding at the end. Backward
    needs the output only.

    Args:
        input: any shape and strides; float16, bfloat16, float32 or float64, or with ``dtype`` anything real.
        dim: along which the results add up to 1. None chooses as PyTorch does, with its warning.
        dtype: of the result; the input is cast to it first. A 16-bit input is read as it is for a float32 result.
        autocast: ``"keep"`` returns the input's dtype under autocast too; ``"torch"`` does what the installed PyTorch
            does there: on a GPU a float32 output. Has no effect with ``dtype``.

    Returns:
        A contiguous tensor of the input's shape. Where everything is -inf, or anything inf or NaN, it is NaN.

    Raises:
        TypeError: ``input`` is not a dense tensor of those dtypes, ``dtype`` is another, ``dim`` is not an int.
        IndexError: ``dim`` is out of range.
        ValueError: another ``autocast``.
    """
    return _along("softmax", input, dim, _stacklevel, dtype, autocast)


def log_softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    autocast: str = "keep",
) -> Tensor:
    """Log-softmax, in place of ``torch.nn.functional.log_softmax``: ``x - log(sum(exp(x)))`` along a dimension.

    Arguments, accuracy and what is raised are those of :func:`softmax`.
    """
    return _along("log_softmax", input, dim, _stacklevel, dtype, autocast)


def scaled_masked_softmax(
    input: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    *,
    causal: str | None = None,
    fully_masked: str = "nan",
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    autocast: str = "keep",
    inplace_backward: bool = False,
) -> Tensor:
    """``dropout(softmax(scale * input + mask))`` over the last dimension (keys), in one pass.

    Neither the scaled nor the masked scores are ever rounded or held in memory, and masked entries are out whatever
    the others are: no large negative number stands in for -inf. Backward needs the probabilities (before dropout).
    With an additive mask, sums of 2^25 or more may be rounded to float32, as PyTorch's are: a row that the least number
    masks throughout comes out uniform.

    Args:
        input: (..., queries, keys), any strides; float16, bfloat16, float32 or float64, or with ``dtype`` anything
            real.
        mask: broadcasts to the input's shape, without a copy. Bool: True is masked out, as in ``masked_fill`` and
            ``key_padding_mask`` (and the opposite of scaled_dot_product_attention's). float16, bfloat16 or float32:
            added to the scaled input. An additive mask that requires grad gets its gradient, by a second pass: summed
            over what it broadcasts to in the precision of the arithmetic, and rounded once.
        scale: a number, used in the precision of the arithmetic.
        causal: ``"bottom_right"``: the last query sees every key, the one before all but the last, and so on;
            ``"square"``: the same, and a ValueError unless there are as many queries as keys. What a query does not
            see is not read. None: every query sees every key.
        fully_masked: what becomes of a row with every entry masked, by ``mask``, ``causal`` or both: ``"nan"``, as in
            PyTorch, or ``"zero"``: zeros, and a gradient of zeros.
        dropout: the probability with which an element becomes 0; the others are divided by ``1 - dropout``. Applies
            whenever it is not 0. A seed drawn from PyTorch's generator of the device is saved in place of a mask.
        dtype, autocast: as for :func:`softmax`.
        inplace_backward: write the input's gradient over the incoming one, if that is contiguous and of the input's
            dtype (else it is written to memory of its own). For a model in which nothing else uses that gradient;
            where something does, backward raises RuntimeError; a full backward hook on the module does. Has no effect
            under torch.compile and torch.func, with ``is_grads_batched``, under a debugger and on tensor subclasses.

    Returns:
        A contiguous tensor of the input's shape.

    Raises:
        TypeError: ``input`` is not a dense tensor of those dtypes, or ``mask`` not of its, ``dtype`` is another,
            ``scale`` or ``dropout`` is not a number.
        ValueError: a mask that does not broadcast or is on another device, too few dimensions, as many queries as keys
            are needed and not there, ``scale`` is not finite, ``dropout`` is outside [0, 1), another ``causal``,
            ``fully_masked`` or ``autocast``.
        RuntimeError: from backward, with ``inplace_backward``, as said there; and with ``create_graph=True``.
    """
    one_of("autocast", autocast, AUTOCAST)
    check_options(scale, causal, fully_masked, dropout, dtype)
    x, out = _dtypes(F.softmax, input, dtype, autocast)
    needed = 1 if causal is None else 2
    if x.dim() < needed:
        raise ValueError(f"input: got shape {tuple(x.shape)}, needs {needed} dimensions or more")
    if causal == "square" and x.shape[-2] != x.shape[-1]:
        raise ValueError(
            f"causal: got 'square' with {x.shape[-2]} queries and {x.shape[-1]} keys, needs as many of both"
        )
    if mask is not None:
        mask = _broadcasting(mask, x)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    overwrite = inplace_backward and not (traced or watched()) and type(x) in (Tensor, Parameter)
    overwrite = overwrite and torch.is_grad_enabled()
    if overwrite:
        alone(x.device)  # measures, which is not for the middle of a backward pass
    seed = torch.randint(2**63 - 1, (), device=x.device) if dropout > 0 else None
    zero_masked, backend = fully_masked == "zero", backends.choose(x)
    plan = Plan(-1, float(scale), causal is not None, False, zero_masked, float(dropout), out, overwrite, backend)
    y, dropped = run(x, mask, seed, plan)
    return dropped if dropout > 0 else y


def check_options(
    scale: float, causal: str | None, fully_masked: str, dropout: float, dtype: torch.dtype | None
) -> None:
    """Raise unless these arguments of :func:`scaled_masked_softmax` are what they are to be."""
    for name, value in (("scale", scale), ("dropout", dropout)):
        if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{name}: got {type(value).__name__}, needs a number")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale: got {scale}, needs a finite number")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout}, needs a number of at least 0 and below 1")
    one_of("causal", causal, CAUSAL)
    one_of("fully_masked", fully_masked, FULLY_MASKED)
    _check_dtype(dtype)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in backends.DTYPES:
        raise TypeError(f"dtype: got {dtype}, needs float16, bfloat16, float32 or float64")


def _along(
    name: str, input: Tensor, dim: int | None, stacklevel: int, dtype: torch.dtype | None, autocast: str
) -> Tensor:
    """softmax or log_softmax, by name."""
    one_of("autocast", autocast, AUTOCAST)
    x, out = _dtypes(getattr(F, name), input, dtype, autocast)
    if dim is None:
        warnings.warn(
            f"Implicit dimension choice for {name} has been deprecated. "
            "Change the call to include dim=X as an argument.",
            stacklevel=stacklevel,
        )
        dim = 0 if x.dim() in (0, 1, 3) else 1
    if isinstance(dim, bool) or not isinstance(dim, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"dim: got {type(dim).__name__}, needs an int")
    dim = operator.index(dim)
    dimensions = max(x.dim(), 1)
    if not -dimensions <= dim < dimensions:
        raise IndexError(f"dim: got {dim}, needs {-dimensions} to {dimensions - 1} for shape {tuple(x.shape)}")
    plan = Plan(
        dim % dimensions - dimensions, 1.0, False, name == "log_softmax", False, 0.0, out, False, backends.choose(x)
    )
    y, _ = run(x if x.dim() else x[None], None, None, plan)
    return y if x.dim() else y[0]


def _dtypes(
    function: Callable[..., Tensor], input: Tensor, dtype: torch.dtype | None, autocast: str
) -> tuple[Tensor, torch.dtype]:
    """What the op is to read, and the dtype of its result."""
    if dtype is None:
        x = floating("input", input)
        return x, torch_dtype(function, x, 1) if autocast == "torch" else x.dtype
    _check_dtype(dtype)
    if not isinstance(input, Tensor) or input.is_complex():
        got = f"dtype {input.dtype}" if isinstance(input, Tensor) else type(input).__name__
        raise TypeError(f"input: got {got}, needs a real Tensor")
    input = dense("input", input)
    read_as_is = dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)
    return input if read_as_is else input.to(dtype), dtype


def _broadcasting(mask: Tensor, x: Tensor) -> Tensor:
    """The mask, with as many dimensions as ``x``."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}, needs a Tensor")
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(f"mask: got dtype {mask.dtype}, needs bool, float16, bfloat16 or float32")
    dense("mask", mask)
    if mask.device != x.device:
        raise ValueError(f"mask: got device {mask.device}, needs that of input, {x.device}")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in sizes):
        raise ValueError(f"mask: got shape {tuple(mask.shape)}, needs one that broadcasts to {tuple(x.shape)}")
    return mask[(None,) * (x.dim() - mask.dim())]

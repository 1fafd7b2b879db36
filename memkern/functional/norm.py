"""LayerNorm and RMSNorm, alone or together with the addition of a residual."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from memkern import backends
from memkern.functional.common import AUTOCAST, floating, one_of, torch_dtype
from memkern.functional.norm_autograd import Plan, norm, y_tells_x
from memkern.ops import computed_in


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    autocast: str = "keep",
    memory_efficient: bool = False,
) -> Tensor:
    """LayerNorm, in place of ``torch.nn.functional.layer_norm``.

    ``y = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions; Ba, Kiros & Hinton 2016,
    arXiv:1607.06450. Arithmetic is fp32 (fp64 for fp64): the mean first, then the squares around it, and one
    rounding at the end. Backward needs the input, 8 bytes a row and the parameters.

    Args:
        input: (..., *normalized_shape), any strides; float16, bfloat16, float32 or float64.
        normalized_shape: the last dimensions, which are normalised together; an int is one dimension.
        weight: of that shape; the input's dtype, or float32 with a 16-bit input. None: 1.
        bias: as ``weight``; their dtypes may differ. None: 0.
        eps: added to the variance; not negative.
        autocast: ``"keep"`` returns the input's dtype under autocast too, and saves the input as it is;
            ``"torch"`` does what the installed PyTorch does there: on a GPU a float32 copy and a float32 output.
        memory_efficient: save y for backward, not the input, which this layer then keeps nobody from freeing. The
            gradients take ``x_hat = (y - bias) / weight``, off by up to half an ulp of ``|x_hat| + |bias / weight|``.
            Where a ``|weight|`` is below 2^-7 or a ``|bias|`` above ``4 |weight|``, the input is saved after all, so
            that a weight of 0 keeps its gradient. This is read from the parameters, which waits for the GPU once
            after each change to them; the input is saved, too, where they cannot be read (torch.compile, torch.func,
            CUDA graph capture, tensor subclasses). A change that PyTorch does not count (through ``.data``, or by
            a foreign kernel) and that breaks the rule makes the gradients NaN.

    Returns:
        A contiguous tensor of the input's shape and dtype.

    Raises:
        TypeError: a tensor of another dtype, ``eps`` not a number, ``normalized_shape`` not of ints.
        ValueError: shapes or devices that do not go together, a negative ``eps``, an empty ``normalized_shape``,
            another ``autocast``.
    """
    return _norm("layer_norm", input, None, normalized_shape, weight, bias, eps, False, autocast, memory_efficient)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centred: bool = False,
    autocast: str = "keep",
    memory_efficient: bool = False,
) -> Tensor:
    """RMSNorm, in place of ``torch.nn.functional.rms_norm``.

    ``y = x / sqrt(mean of x^2 + eps) * weight`` over the last dimensions; Zhang & Sennrich 2019, arXiv:1910.07467.
    Backward needs the input, 4 bytes a row and the weight.

    Args:
        eps: None takes the machine epsilon of the arithmetic: float32's, or float64's for a float64 input.
        zero_centred: scale by ``1 + weight``.

    The other arguments, what is returned and what is raised are those of :func:`layer_norm`.
    """
    return _norm(
        "rms_norm", input, None, normalized_shape, weight, None, eps, zero_centred, autocast, memory_efficient
    )[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    autocast: str = "keep",
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """``summed = input + residual`` and ``layer_norm(summed)`` in one pass.

    Args:
        residual: of the input's shape and device. Dtypes that differ are promoted first, as ``+`` does.

    Returns:
        ``(y, summed)``, contiguous; ``summed`` is rounded to its dtype before it is normalised. Backward takes the
        gradients of both. The other arguments and what is raised are those of :func:`layer_norm`.
    """
    residual = floating("residual", residual)
    return _norm("layer_norm", input, residual, normalized_shape, weight, bias, eps, False, autocast, memory_efficient)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centred: bool = False,
    autocast: str = "keep",
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """``summed = input + residual`` and ``rms_norm(summed)`` in one pass.

    Arguments, what is returned and what is raised are those of :func:`add_layer_norm` and :func:`rms_norm`.
    """
    residual = floating("residual", residual)
    return _norm(
        "rms_norm", input, residual, normalized_shape, weight, None, eps, zero_centred, autocast, memory_efficient
    )


def _norm(
    name: str,
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    zero_centred: bool,
    autocast: str,
    memory_efficient: bool,
) -> tuple[Tensor, Tensor]:
    """Check everything, then run. Returns y and summed."""
    x = floating("input", input)
    shape = as_shape(normalized_shape)
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"normalized_shape: got {shape}, needs the last dimensions of input's shape {tuple(x.shape)}")
    if eps is None and name == "rms_norm":
        eps = torch.finfo(computed_in(x)).eps
    check_eps(eps)
    one_of("autocast", autocast, AUTOCAST)
    dtype = x.dtype
    if residual is not None:
        _check_beside(x, "residual", residual, x.shape)
        if residual.dtype != dtype:
            dtype = torch.promote_types(dtype, residual.dtype)
    policy = torch_dtype(getattr(F, name), x.to(dtype), (1,)) if autocast == "torch" else dtype
    for parameter_name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_beside(x, parameter_name, parameter, shape)
            if policy == dtype and parameter.dtype != dtype and (dtype.itemsize, parameter.dtype) != (2, torch.float32):
                or_wider = " or torch.float32" if dtype.itemsize == 2 else ""
                raise TypeError(f"{parameter_name}: got dtype {parameter.dtype}, needs {dtype}{or_wider}")

    unfused = None
    if policy != dtype:  # as autocast does: everything to float32, after the addition
        unfused, residual = (x if residual is None else x + residual), None
        x, weight, bias = (None if t is None else t.to(policy) for t in (unfused, weight, bias))
    elif residual is not None:
        x, residual = x.to(dtype), residual.to(dtype)
    zero_centred = zero_centred and weight is not None
    from_y = memory_efficient and _y_tells_x(weight, bias, zero_centred)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:  # the kernels take one for both
        weight, bias = weight.float(), bias.float()
    plan = Plan(name, math.prod(shape), float(eps), zero_centred, from_y, backends.choose(x))
    y, summed, _, _ = norm(x, residual, weight, bias, plan)
    return y, summed if unfused is None else unfused


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """``normalized_shape`` as a tuple of at least one dimension."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not isinstance(shape, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in shape):
        raise TypeError(f"normalized_shape: got {normalized_shape!r}, needs an int or a sequence of ints")
    if len(shape) == 0:
        raise ValueError("normalized_shape: got no dimension, needs at least one")
    return tuple(shape)


def check_eps(eps: float) -> None:
    if not isinstance(eps, (int, float)):
        raise TypeError(f"eps: got {type(eps).__name__}, needs a number")
    if not eps >= 0:
        raise ValueError(f"eps: got {eps}, needs a number that is not negative")


def _check_beside(x: Tensor, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``value`` is a floating tensor of that shape on the device of ``x``."""
    floating(name, value)
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs {tuple(shape)}")
    if value.device != x.device:
        raise ValueError(f"{name}: got device {value.device}, needs that of input, {x.device}")


# What was found out about parameters, and about which state of them.
_verdicts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _y_tells_x(weight: Tensor | None, bias: Tensor | None, zero_centred: bool) -> bool:
    """Whether y can be saved in place of x; read from the parameters once after each change to them."""
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    if not given:
        return True
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) not in (Tensor, Parameter) or t.is_meta or t.is_inference() for t in given):
        return False
    state = (zero_centred, *((t.data_ptr(), t._version) for t in given))
    known = _verdicts.get(given[0])
    if known is None or known[0] != state:
        if given[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        known = _verdicts[given[0]] = state, bool(y_tells_x(weight, bias, zero_centred))
    return known[1]

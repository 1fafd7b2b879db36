"""Every op of the package: its schema, and its fake for tracing, on one page.

An op exists once per backend, under the same name and schema, in a namespace of its own:
``torch.ops.memkern_cuda.gelu_forward``, ``torch.ops.memkern_cpu.gelu_forward`` and so on. The native
libraries only add kernels to what is defined here. Ops have no autograd of their own: gradients come
from the Functions in ``functional/``, which also check the arguments. (``memkern::linear_cross_entropy``, which a
compiler sees in place of a loop over these, is in ``functional/linear_cross_entropy_autograd.py``.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What every optimizer step takes. lr_tensor, where given, is read instead of lr; a gradient is divided by
# grad_scale and multiplied by clip; nothing is written where found_inf is not 0. Each of them has one element.
_ON_DEVICE = "Tensor? lr_tensor, Tensor? grad_scale, Tensor? clip, Tensor? found_inf, float lr"

SCHEMAS = {
    "gelu_forward": "(Tensor x, str approximate) -> Tensor",
    "gelu_backward": "(Tensor dy, Tensor x, str approximate) -> Tensor",
    # Norms of the last dimensions of x, which hold `columns` elements; the rest are rows. y and summed (x +
    # residual rounded to x's dtype, which is then what is normalised; no elements without residual) are
    # contiguous like x; mean and rstd (rows,) in fp32, fp64 for fp64. weight and bias have x's dtype or fp32,
    # one for both. Backward: x is what was normalised, or y with from_y, and x_hat is then (y - bias) / weight;
    # dsummed is added to dx; a gradient that is not needed comes back with no elements.
    "layer_norm_forward": (
        "(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, SymInt columns, float eps)"
        " -> (Tensor y, Tensor summed, Tensor mean, Tensor rstd)"
    ),
    "layer_norm_backward": (
        "(Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
        " SymInt columns, bool from_y, bool need_dx, bool need_dweight, bool need_dbias)"
        " -> (Tensor dx, Tensor dweight, Tensor dbias)"
    ),
    # As above, without a mean. zero_centred: the row is scaled by 1 + weight.
    "rms_norm_forward": (
        "(Tensor x, Tensor? residual, Tensor? weight, SymInt columns, float eps, bool zero_centred)"
        " -> (Tensor y, Tensor summed, Tensor rstd)"
    ),
    "rms_norm_backward": (
        "(Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor rstd, SymInt columns, bool zero_centred,"
        " bool from_y, bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)"
    ),
    # Softmax (log-softmax with log) over dimension dim of scale x + mask. mask has x's shape (expanded, any strides):
    # bool, True is masked out, or fp16, bf16 or fp32, which is added. causal, only over the last dimension: query q,
    # of the last but one, sees keys 0 ... q + keys - queries. zero_masked: a row with every entry masked gives zeros,
    # not NaN. y, contiguous, has dtype: x's, or fp32 where x is 16-bit. dropped is y after dropout (no elements
    # without): element i of y in memory order falls to the Philox number of seed (int64, 0-d) and i; see csrc/random.h.
    "softmax_forward": (
        "(Tensor x, Tensor? mask, int dim, float scale, bool causal, bool log, bool zero_masked, float dropout,"
        " Tensor? seed, ScalarType dtype) -> (Tensor y, Tensor dropped)"
    ),
    # dx, contiguous, has dtype, that of x. The one with _ writes dx over dy, which is then dense like y.
    "softmax_backward": (
        "(Tensor dy, Tensor y, int dim, float scale, bool causal, bool log, float dropout, Tensor? seed,"
        " ScalarType dtype) -> Tensor"
    ),
    "softmax_backward_": (
        "(Tensor(a!) dy, Tensor y, int dim, float scale, bool causal, bool log, float dropout, Tensor? seed) -> ()"
    ),
    # Of each row of logits (rows, classes). target: int64 (rows,), or probabilities (rows, classes) in the logits'
    # dtype or fp32; weight (classes,) in fp32. Logits are s = softcap tanh(logits / softcap) where softcap is not 0.
    # loss = cross-entropy + z_loss lse^2 and lse = log sum exp s, both (rows,) in fp32, fp64 for fp64; an ignored
    # row's loss is 0. Backward: dlogits of sum(dloss loss); the one with _ writes it over the logits.
    "cross_entropy_forward": (
        "(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, float z_loss,"
        " float softcap) -> (Tensor loss, Tensor lse)"
    ),
    "cross_entropy_backward": (
        "(Tensor dloss, Tensor logits, Tensor lse, Tensor target, Tensor? weight, int ignore_index,"
        " float label_smoothing, float z_loss, float softcap) -> Tensor"
    ),
    "cross_entropy_backward_": (
        "(Tensor dloss, Tensor(a!) logits, Tensor lse, Tensor target, Tensor? weight, int ignore_index,"
        " float label_smoothing, float z_loss, float softcap) -> ()"
    ),
    # Of each row, KL(softmax(teacher / temperature) || softmax(logits / temperature)), which is at least 0, and both
    # log-sum-exps.
    "distillation_forward": (
        "(Tensor logits, Tensor teacher, float temperature) -> (Tensor loss, Tensor lse, Tensor teacher_lse)"
    ),
    "distillation_backward": (
        "(Tensor dloss, Tensor logits, Tensor lse, Tensor teacher, Tensor teacher_lse, float temperature) -> Tensor"
    ),
    # -> fp32 (3,): 1 where a gradient / grad_scale is not finite, else 0; the norm of all of them; the
    # factor that brings it down to max_norm, at most 1
    "check_and_norm": "(Tensor[] grads, Tensor? grad_scale, float max_norm) -> Tensor",
    # adds 1 to every step where found_inf is 0 or not given, else 1 to skipped
    "advance": "(Tensor(a!)[] steps, Tensor(b!)? skipped, Tensor? found_inf) -> ()",
    # The lists are of one length; max_exp_avg_sqs and masters may be empty. A master is the fp32 parameter
    # that params then holds a rounded copy of. steps are those of advance, already advanced.
    "adamw_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    f"Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, Tensor[] steps, {_ON_DEVICE}, float beta1, float beta2, "
    "float eps, float weight_decay, bool decoupled, bool maximize, bool write_grads) -> ()",
    "sgd_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, Tensor(d!)[] masters, "
    f"Tensor[] steps, {_ON_DEVICE}, float momentum, float dampening, float weight_decay, bool nesterov, "
    "bool maximize, bool write_grads) -> ()",
    "lamb_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    f"Tensor(e!)[] masters, Tensor[] steps, {_ON_DEVICE}, float beta1, float beta2, float eps, "
    "float weight_decay, bool maximize, bool write_grads) -> ()",
    "lion_step": "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] masters, "
    f"{_ON_DEVICE}, float beta1, float beta2, float weight_decay, bool maximize, bool write_grads) -> ()",
}


def _like_x(x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


def _like_x_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x)


def norm_rows(x: Tensor, columns: int) -> int:
    """How many rows of ``columns`` elements ``x`` has; 0 where columns is 0."""
    return x.numel() // columns if columns else 0


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic and of row statistics: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm_outputs(x: Tensor, residual: Tensor | None, columns: int, statistics: int) -> tuple[Tensor, ...]:
    """y, summed and that many row statistics, uninitialised."""
    dtype = computed_in(x)
    summed = x.new_empty(0 if residual is None else x.shape)
    rows = norm_rows(x, columns)
    return x.new_empty(x.shape), summed, *(x.new_empty(rows, dtype=dtype) for _ in range(statistics))


def _if_needed(needed: bool, like: Tensor | None, x: Tensor) -> Tensor:
    """A contiguous tensor like ``like`` where its gradient is needed, else one with no elements."""
    return torch.empty_like(like, memory_format=torch.contiguous_format) if needed else x.new_empty(0)


def _layer_norm_forward(x, residual, weight, bias, columns, eps):
    return _norm_outputs(x, residual, columns, statistics=2)


def _layer_norm_backward(dy, dsummed, x, weight, bias, mean, rstd, columns, from_y, need_dx, need_dweight, need_dbias):
    return _if_needed(need_dx, x, x), _if_needed(need_dweight, weight, x), _if_needed(need_dbias, bias, x)


def _rms_norm_forward(x, residual, weight, columns, eps, zero_centred):
    return _norm_outputs(x, residual, columns, statistics=1)


def _rms_norm_backward(dy, dsummed, x, weight, rstd, columns, zero_centred, from_y, need_dx, need_dweight):
    return _if_needed(need_dx, x, x), _if_needed(need_dweight, weight, x)


def _softmax_forward(x, mask, dim, scale, causal, log, zero_masked, dropout, seed, dtype):
    y = x.new_empty(x.shape, dtype=dtype)
    return y, torch.empty_like(y) if dropout > 0 else y.new_empty(0)


def _softmax_backward(dy, y, dim, scale, causal, log, dropout, seed, dtype):
    return y.new_empty(y.shape, dtype=dtype)


def _each_row(logits: Tensor, outputs: int) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(logits.shape[0], dtype=computed_in(logits)) for _ in range(outputs))


def _cross_entropy_forward(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap):
    return _each_row(logits, 2)


def _distillation_forward(logits, teacher, temperature):
    return _each_row(logits, 3)


def _like_logits(dloss: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _check_and_norm(grads: list[Tensor], grad_scale: Tensor | None, max_norm: float) -> Tensor:
    return grads[0].new_empty(3, dtype=torch.float32)


def _nothing(*arguments: Any) -> None:
    pass


FAKES: dict[str, Callable[..., Any]] = {
    "gelu_forward": _like_x,
    "gelu_backward": _like_x_backward,
    "layer_norm_forward": _layer_norm_forward,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_forward": _rms_norm_forward,
    "rms_norm_backward": _rms_norm_backward,
    "softmax_forward": _softmax_forward,
    "softmax_backward": _softmax_backward,
    "softmax_backward_": _nothing,
    "cross_entropy_forward": _cross_entropy_forward,
    "cross_entropy_backward": _like_logits,
    "cross_entropy_backward_": _nothing,
    "distillation_forward": _distillation_forward,
    "distillation_backward": _like_logits,
    "check_and_norm": _check_and_norm,
    "advance": _nothing,
    "adamw_step": _nothing,
    "sgd_step": _nothing,
    "lamb_step": _nothing,
    "lion_step": _nothing,
}


def check_like(name: str, value: Tensor, x: Tensor, of: str = "x") -> None:
    """Raise ValueError unless ``value`` has the shape, dtype and device of ``x``, which messages call ``of``."""
    for what in ("shape", "dtype", "device"):
        got, needed = getattr(value, what), getattr(x, what)
        if got != needed:
            raise ValueError(f"{name}: got {what} {got}, needs that of {of}, {needed}")


def same_order(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape put their elements in the same order in memory."""
    return x.stride() == y.stride() or all(
        size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), y.stride(), strict=True)
    )


def is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill one stretch of memory, in whatever order of dimensions."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


_defined: dict[str, torch.library.Library] = {}


def define(backend: str) -> torch.library.Library:
    """Define every op in namespace ``memkern_<backend>``, once, and return the library."""
    if backend not in _defined:
        library = torch.library.Library(f"memkern_{backend}", "DEF")  # noqa: TOR901 - lives as long as the process
        for name, schema in SCHEMAS.items():
            library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.register_fake(f"memkern_{backend}::{name}", FAKES[name], lib=library)
        _defined[backend] = library
    return _defined[backend]


def op(backend: str, name: str) -> Any:
    """The op ``name`` of ``backend``, ready to call."""
    return getattr(getattr(torch.ops, f"memkern_{backend}"), name).default

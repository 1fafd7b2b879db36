"""Cross-entropy of logits, and distillation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import _reduction

from memkern import backends
from memkern.functional.common import floating, number, one_of
from memkern.functional.cross_entropy_autograd import Distillation, GradientInForward, row_loss
from memkern.functional.cross_entropy_rows import Options, Rows, flat, loss_dtype, target_rows

DISTILLATION_REDUCTIONS = ("none", "mean", "sum", "batchmean")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    grad_in_forward: bool = False,
    overwrite_logits: bool = False,
) -> Tensor:
    """Cross-entropy in nats, in place of ``torch.nn.functional.cross_entropy``.

    A row's loss is ``sum_c w_c q_c (lse - s_c) + z_loss lse^2`` with logits s, ``lse = log sum_c exp(s_c)``, target q
    (smoothed: Szegedy et al. 2015, arXiv:1512.00567) and class weights w; the second term is the z-loss of Chowdhery
    et al. 2022, arXiv:2204.02311. Arithmetic is fp32 (fp64 for fp64), also of 16-bit logits, and the gradient is
    rounded once. Backward needs the logits, the target and 4 bytes a row (an fp32 lse, so p is within 6e-8 |lse|).

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), any strides; float16, bfloat16, float32 or float64. With d1 ...
            a copy with the classes last is made, and saved in their place.
        target: classes, int64 or uint8, of the input's shape without C; or floating probabilities of its shape,
            through which gradients flow, too.
        weight: (C), floating, of any dtype: the weight of each class. None: 1.
        size_average, reduce: PyTorch's deprecated forms of ``reduction``.
        ignore_index: rows of this class have no loss and no gradient, whatever they hold. With probabilities it must
            be negative, and has no effect.
        reduction: ``"mean"``, over the weights of the classes that are not ignored, or over all rows with
            probabilities (NaN where there are none, with gradients of 0); ``"sum"``; or ``"none"``. The z-loss is part
            of a row's loss.
        label_smoothing: 0 to 1.
        z_loss: factor of the z-loss, not negative.
        softcap: the logits become ``softcap tanh(logits / softcap)`` first (Gemma 2, arXiv:2408.00118); a positive
            number that float32 has at its full precision.
        grad_in_forward: make the gradient in the forward pass and save it alone (2 bytes a 16-bit logit), no logits.
            For one backward pass: a second one raises (but after batched ones, ``is_grads_batched``), and so do second
            derivatives and torch.func. Has no effect where nothing needs a gradient, or probabilities or weights do.
        overwrite_logits: with ``grad_in_forward``, write that gradient over the logits, so that the loss allocates
            nothing of their size. The logits hold no logits from then on; a backward pass of another operation that
            saved them raises. Has no effect under torch.compile, which plans memory itself.

    Returns:
        The loss, in the input's dtype as PyTorch's: a 16-bit loss of 16-bit logits; float32 under autocast.

    Raises:
        TypeError: a tensor of another dtype, an option that is not a number.
        ValueError: shapes, devices or options that do not go together or are out of range; ``overwrite_logits`` of
            a leaf that requires a gradient, of elements that share memory, or of (N, C, d1, ...).
        IndexError: a class out of range, on the CPU. On a GPU its row's loss and gradient are NaN.
    """
    x = floating("input", input)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if x.dim() == 0:
        raise ValueError("input: got no dimension, needs (C), (N, C) or (N, C, d1, ...)")
    classes_dim = min(1, x.dim() - 1)
    shape = (*x.shape[:classes_dim], *x.shape[classes_dim + 1 :])
    targets = target_rows(target, x, x.dtype, shape, x.shape, classes_dim)
    last = x if classes_dim == x.dim() - 1 else x.movedim(classes_dim, -1)
    rows = Rows(flat(last), targets, x.shape[classes_dim], shape)
    options = Options(weight, ignore_index, reduction, label_smoothing, z_loss, softcap)
    plan, weight = options.plan(rows), options.weight_for(rows)
    check_overwrite(overwrite_logits, grad_in_forward)
    if overwrite_logits:
        _check_overwritten(x)
    in_forward = grad_in_forward and torch.is_grad_enabled() and x.requires_grad
    if in_forward and not targets.requires_grad and (weight is None or not weight.requires_grad):
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("grad_in_forward: got True under torch.func or vmap, which it does not go with")
        overwrite = overwrite_logits and not torch.compiler.is_compiling()
        loss = GradientInForward.apply(rows.x, targets, weight, plan, overwrite)
    else:
        loss = row_loss(rows.x, targets, weight, plan)[0]
    return options.reduced(loss, rows).to(loss_dtype(x))


def check_overwrite(overwrite_logits: bool, grad_in_forward: bool) -> None:
    if overwrite_logits and not grad_in_forward:
        raise ValueError("overwrite_logits: needs grad_in_forward=True, whose gradient it is that is written")


def _check_overwritten(x: Tensor) -> None:
    if x.dim() > 2:
        raise ValueError(f"overwrite_logits: got input of shape {tuple(x.shape)}, needs (C) or (N, C)")
    reach = 1  # of all elements in the dimensions so far, from the smallest stride on
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < reach:
            raise ValueError(f"overwrite_logits: got input of strides {x.stride()}, needs a place for every element")
        reach = stride * size
    if any(t is not None and t.is_leaf and t.requires_grad for t in (x, x._base)):
        raise ValueError("overwrite_logits: got input that is a leaf (or a view of one) and requires a gradient")


def distillation_loss(
    student: Tensor, teacher: Tensor, temperature: float = 1.0, reduction: str = "batchmean"
) -> Tensor:
    """``temperature^2 KL(softmax(teacher / temperature) || softmax(student / temperature))``, in nats, of each row.

    Hinton, Vinyals & Dean 2015, arXiv:1503.02531; the square keeps the gradients' size. Equal to ``temperature^2``
    times ``torch.nn.functional.kl_div`` of both log-softmaxes, none of which is kept: backward needs both logits and
    8 bytes a row. Arithmetic is fp32 (fp64 for fp64). Both logits are read once, and those of rows whose divergence is
    below 1/4 nat once more: it is then summed in a form that does not cancel, and is never below 0.

    Args:
        student, teacher: logits (..., C), any strides; float16, bfloat16, float32 or float64, promoted to one dtype.
            Gradients flow to the teacher, too, where it requires them (through plain PyTorch).
        temperature: 1e-18 to 1e18 (float32 has its square, too).
        reduction: ``"batchmean"`` divides the sum by the size of the first dimension, as PyTorch does; ``"mean"`` by
            the number of rows (PyTorch: of elements); ``"sum"``; ``"none"``: (...).

    Returns:
        The loss, in the dtype of the logits; float32 under autocast.

    Raises:
        TypeError: a tensor of another dtype, a ``temperature`` that is not a number.
        ValueError: shapes or devices that differ, no dimension, a ``temperature`` or ``reduction`` out of range.
    """
    x, other = floating("student", student), floating("teacher", teacher)
    if x.dim() == 0:
        raise ValueError("student: got no dimension, needs (..., classes)")
    for what in ("shape", "device"):
        if getattr(x, what) != getattr(other, what):
            raise ValueError(f"teacher: got {what} {getattr(other, what)}, needs that of student, {getattr(x, what)}")
    number("temperature", temperature, lambda t: 1e-18 <= t <= 1e18, "1e-18 to 1e18")
    one_of("reduction", reduction, DISTILLATION_REDUCTIONS)
    dtype = torch.promote_types(x.dtype, other.dtype)
    x, other = (flat(t.to(dtype)) for t in (x, other))
    loss = row_loss(x, other, None, Distillation(float(temperature), backends.choose(x)))[0] * temperature**2
    if reduction == "none":
        return loss.reshape(student.shape[:-1]).to(loss_dtype(x))
    parts = {"sum": 1, "mean": loss.numel(), "batchmean": student.shape[0] if student.dim() > 1 else 1}
    return (loss.sum() / parts[reduction]).to(loss_dtype(x))

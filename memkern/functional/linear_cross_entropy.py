"""A linear layer and the cross-entropy of what it gives, without the logits of more than a chunk of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from memkern.functional.common import autocasts, floating, integer
from memkern.functional.cross_entropy_rows import Options, Rows, flat, loss_dtype, target_rows
from memkern.functional.linear_cross_entropy_autograd import LinearCrossEntropy, Plan, differentiable

CHUNK_BYTES = 2**26  # of logits, at least
FEWEST_TOKENS = 128


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias), target)`` that never holds all logits.

    A chunk of tokens has its logits made, its losses, its gradient written over the logits, and that multiplied into
    the gradients of hidden, weight and bias. For ``"mean"`` and ``"sum"`` this is done in the forward pass, where
    gradients are needed, and backward multiplies by the incoming gradient; for ``"none"`` backward makes the logits
    again. Gradients are summed up and kept in float32 (that of hidden in bfloat16 for bfloat16) until then, so fp16
    does not underflow before the loss scale is known.

    Args:
        hidden: (..., features), any strides; float16, bfloat16, float32 or float64.
        weight: (classes, features); of the dtype of hidden (under autocast of any).
        target: classes (...), int64 or uint8; or probabilities (..., classes).
        bias: (classes).
        class_weight: the ``weight`` of :func:`memkern.functional.cross_entropy`. It, ``ignore_index``, ``reduction``,
            ``label_smoothing``, ``z_loss`` and ``softcap`` are as there.
        chunk_tokens: how many tokens have logits at a time. None: as many as make logits of 64 MiB, or of a quarter
            of a float32 weight where that is more.

    Returns:
        The loss, in the dtype of hidden; float32 under autocast, which also has the logits in its dtype. Derivatives
        of any other kind (of probabilities and class weights, second, forward-mode, torch.func, vmap, batched) are
        right, too, by way of all logits at once.

    Raises:
        TypeError: a tensor of another dtype, an option that is not a number.
        ValueError: shapes, dtypes, devices or options that do not go together or are out of range.
        IndexError: a class out of range, on the CPU. On a GPU its loss and gradient are NaN.
    """
    dtype = _logits_dtype(hidden)
    rows = _rows(hidden, weight, target, bias, dtype)
    options = Options(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, "class_weight")
    needed = any(t is not None and t.requires_grad for t in (hidden, weight, bias)) and torch.is_grad_enabled()
    summed = reduction != "none"
    check_chunk(chunk_tokens)
    chunk = _chunk(weight, dtype) if chunk_tokens is None else chunk_tokens
    plan = Plan(options.plan(rows), chunk, dtype, summed, in_forward=summed and needed)
    arguments = rows.x, weight, bias, rows.target, options.weight_for(rows)
    loss = (differentiable if _needs_all_logits(*arguments) else LinearCrossEntropy.apply)(plan, *arguments)
    return options.reduced(loss, rows).to(loss_dtype(hidden))


def check_chunk(chunk_tokens: object) -> None:
    if chunk_tokens is not None:
        integer("chunk_tokens", chunk_tokens, 1)


def _logits_dtype(hidden: Tensor) -> torch.dtype:
    """As those of torch.nn.functional.linear."""
    autocast = autocasts(floating("hidden", hidden)) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype


def _rows(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Rows:
    if hidden.dim() == 0:
        raise ValueError("hidden: got no dimension, needs (..., features)")
    if floating("weight", weight).dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, needs (classes, {hidden.shape[-1]})")
    classes, shape = weight.shape[0], hidden.shape[:-1]
    if bias is not None and tuple(floating("bias", bias).shape) != (classes,):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, needs ({classes},)")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.device != hidden.device:
            raise ValueError(f"{name}: got device {parameter.device}, needs that of hidden, {hidden.device}")
        if parameter.dtype != hidden.dtype and not autocasts(hidden):
            raise ValueError(f"{name}: got dtype {parameter.dtype}, needs that of hidden, {hidden.dtype}")
    return Rows(flat(hidden), target_rows(target, hidden, dtype, shape, (*shape, classes), -1), classes, shape)


def _chunk(weight: Tensor, dtype: torch.dtype) -> int:
    """Each chunk reads and writes the weight's gradient once, which is little beside its three matrix products if
    the chunk has many tokens, and so may take as much memory."""
    classes, features = weight.shape
    token = max(1, classes * dtype.itemsize)
    return max(FEWEST_TOKENS, max(CHUNK_BYTES, classes * features) // token)


def _needs_all_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None):
    """Whether other derivatives may be asked for than the first ones of hidden, weight and bias."""
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return True
    others = any(t is not None and t.requires_grad for t in (target, class_weight))
    return others and torch.is_grad_enabled()

"""The fused layers as modules: subclasses of torch's own, so that everything built on those still works."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkern import functional
from memkern.functional.common import AUTOCAST, floating, one_of
from memkern.functional.cross_entropy import check_overwrite
from memkern.functional.cross_entropy_rows import Options
from memkern.functional.gelu import GELU_FORMS
from memkern.functional.linear_cross_entropy import check_chunk
from memkern.functional.norm import check_eps
from memkern.functional.softmax import check_options


def _repr(layer: torch.nn.Module, always: str, *options: str) -> str:
    """``always``, and those options of the layer that are not at their default."""
    parameters = inspect.signature(type(layer)).parameters
    given = ((name, getattr(layer, name)) for name in options)
    changed = [f"{name}={value!r}" for name, value in given if value != parameters[name].default]
    return ", ".join([always, *changed] if always else changed)


class GELU(torch.nn.GELU):
    """``torch.nn.GELU`` on the fused kernels; see :func:`memkern.functional.gelu`.

    Args:
        approximate: ``"none"`` (erf form) or ``"tanh"``.

    Raises:
        ValueError: another ``approximate``.
    """

    def __init__(self, approximate: str = "none") -> None:
        one_of("approximate", approximate, GELU_FORMS)
        super().__init__(approximate)

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate=self.approximate)


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` on the fused kernels; see :func:`memkern.functional.layer_norm`.

    Args:
        autocast, memory_efficient: as there. The others are PyTorch's.

    Raises:
        ValueError: a negative ``eps``, another ``autocast``.
    """

    # Also on the class, so that a torch.nn.LayerNorm whose class is changed (memkern.patch) has them.
    autocast = "keep"
    memory_efficient = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        autocast: str = "keep",
        memory_efficient: bool = False,
    ) -> None:
        check_eps(eps)
        one_of("autocast", autocast, AUTOCAST)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.autocast, self.memory_efficient = autocast, memory_efficient

    def extra_repr(self) -> str:
        return _repr(self, super().extra_repr(), "autocast", "memory_efficient")

    def _arguments(self) -> dict[str, Any]:
        names = ("normalized_shape", "weight", "bias", "eps", "autocast", "memory_efficient")
        return {name: getattr(self, name) for name in names}

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, **self._arguments())


class AddLayerNorm(LayerNorm):
    """LayerNorm of ``input + residual``, in one pass; see :func:`memkern.functional.add_layer_norm`.

    Called with ``(input, residual)``, it returns ``(y, summed)``. Arguments and state_dict are those of LayerNorm.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_layer_norm(input, residual, **self._arguments())


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` on the fused kernels; see :func:`memkern.functional.rms_norm`.

    Args:
        zero_centred: scale by ``1 + weight``; the weight then starts at 0, not 1.
        autocast, memory_efficient: as there. The others are PyTorch's.

    Raises:
        ValueError: a negative ``eps``, another ``autocast``.
    """

    autocast = "keep"
    memory_efficient = False
    zero_centred = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centred: bool = False,
        autocast: str = "keep",
        memory_efficient: bool = False,
    ) -> None:
        if eps is not None:
            check_eps(eps)
        one_of("autocast", autocast, AUTOCAST)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.zero_centred, self.autocast, self.memory_efficient = zero_centred, autocast, memory_efficient
        self.reset_parameters()

    def extra_repr(self) -> str:
        return _repr(self, super().extra_repr(), "zero_centred", "autocast", "memory_efficient")

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_centred and self.weight is not None:
            torch.nn.init.zeros_(self.weight)

    def _arguments(self) -> dict[str, Any]:
        names = ("normalized_shape", "weight", "eps", "zero_centred", "autocast", "memory_efficient")
        return {name: getattr(self, name) for name in names}

    def forward(self, input: Tensor) -> Tensor:
        return functional.rms_norm(input, **self._arguments())


class AddRMSNorm(RMSNorm):
    """RMSNorm of ``input + residual``, in one pass; see :func:`memkern.functional.add_rms_norm`.

    Called with ``(input, residual)``, it returns ``(y, summed)``. Arguments and state_dict are those of RMSNorm.
    """

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return functional.add_rms_norm(input, residual, **self._arguments())


class _AlongDimension(torch.nn.Module):
    """What Softmax and LogSoftmax share: to come before torch's own among the bases."""

    # Also on the class, so that a layer of torch.nn whose class is changed (memkern.patch) has it.
    autocast = "keep"
    dim: int | None
    _function: str

    def __init__(self, dim: int | None = None, *, autocast: str = "keep") -> None:
        one_of("autocast", autocast, AUTOCAST)
        super().__init__(dim)
        self.autocast = autocast

    def extra_repr(self) -> str:
        return _repr(self, super().extra_repr(), "autocast")

    def forward(self, input: Tensor) -> Tensor:
        return getattr(functional, self._function)(input, self.dim, _stacklevel=5, autocast=self.autocast)


class Softmax(_AlongDimension, torch.nn.Softmax):
    """``torch.nn.Softmax`` on the fused kernels; see :func:`memkern.functional.softmax`.

    Args:
        dim, autocast: as there.

    Raises:
        ValueError: another ``autocast``.
    """

    _function = "softmax"


class LogSoftmax(_AlongDimension, torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on the fused kernels; see :func:`memkern.functional.log_softmax`.

    Arguments and what is raised are those of :class:`Softmax`.
    """

    _function = "log_softmax"


class ScaledMaskedSoftmax(torch.nn.Module):
    """Attention's softmax of scores, in one pass; see :func:`memkern.functional.scaled_masked_softmax`.

    Called with ``(input, mask=None)``. Arguments and what is raised are those of the function, except that dropout
    applies in training mode only.
    """

    def __init__(
        self,
        scale: float = 1.0,
        *,
        causal: str | None = None,
        fully_masked: str = "nan",
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        autocast: str = "keep",
        inplace_backward: bool = False,
    ) -> None:
        check_options(scale, causal, fully_masked, dropout, dtype)
        one_of("autocast", autocast, AUTOCAST)
        super().__init__()
        self.scale, self.causal, self.fully_masked, self.dropout = float(scale), causal, fully_masked, float(dropout)
        self.dtype, self.autocast, self.inplace_backward = dtype, autocast, inplace_backward

    def extra_repr(self) -> str:
        names = ("causal", "fully_masked", "dropout", "dtype", "autocast", "inplace_backward")
        return _repr(self, f"scale={self.scale}", *names)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        names = ("scale", "causal", "fully_masked", "dtype", "autocast", "inplace_backward")
        options = {name: getattr(self, name) for name in names}
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_masked_softmax(input, mask, dropout=dropout, **options)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on the fused kernels; see :func:`memkern.functional.cross_entropy`.

    Args:
        z_loss, softcap, grad_in_forward, overwrite_logits: as there. The others are PyTorch's.

    Raises:
        TypeError, ValueError: options that are no numbers, or out of range.
    """

    # Also on the class, so that a torch.nn.CrossEntropyLoss whose class is changed (memkern.patch) has them.
    z_loss = 0.0
    softcap: float | None = None
    grad_in_forward = False
    overwrite_logits = False

    def __init__(
        self,
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
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        Options(weight, ignore_index, self.reduction, label_smoothing, z_loss, softcap).check()
        check_overwrite(overwrite_logits, grad_in_forward)
        self.z_loss, self.softcap = z_loss, softcap
        self.grad_in_forward, self.overwrite_logits = grad_in_forward, overwrite_logits

    def extra_repr(self) -> str:
        return _repr(self, super().extra_repr(), "z_loss", "softcap", "grad_in_forward", "overwrite_logits")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        names = ("weight", "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap")
        options = {name: getattr(self, name) for name in (*names, "grad_in_forward", "overwrite_logits")}
        return functional.cross_entropy(input, target, **options)


if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # PyTorch 2.14 has it

    class LinearCrossEntropyLoss(torch.nn.LinearCrossEntropyLoss):
        """``torch.nn.LinearCrossEntropyLoss`` by chunks; see :func:`memkern.functional.linear_cross_entropy`.

        Args:
            out_features: with any, all logits are made at once, and then :func:`memkern.functional.cross_entropy`.
                The input is then (N, in_features); else (..., in_features), of which PyTorch takes up to 2 dimensions.
            options: PyTorch's way of chunking, not used; ``chunk_tokens`` is.
            z_loss, softcap, chunk_tokens: as there. The others are PyTorch's.

        Raises:
            TypeError, ValueError: options that are no numbers, or out of range.
        """

        z_loss = 0.0
        softcap: float | None = None
        chunk_tokens: int | None = None

        def __init__(
            self,
            in_features: int,
            num_classes: int,
            *,
            z_loss: float = 0.0,
            softcap: float | None = None,
            chunk_tokens: int | None = None,
            **others: Any,
        ) -> None:
            super().__init__(in_features, num_classes, **others)
            ignored = -100 if self.ignore_index is None else self.ignore_index
            Options(None, ignored, self.reduction, self.label_smoothing, z_loss, softcap).check()
            check_chunk(chunk_tokens)
            self.z_loss, self.softcap, self.chunk_tokens = z_loss, softcap, chunk_tokens

        def extra_repr(self) -> str:
            return _repr(self, super().extra_repr(), "z_loss", "softcap", "chunk_tokens")

        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            options = {name: getattr(self, name) for name in ("reduction", "label_smoothing", "z_loss", "softcap")}
            options["ignore_index"] = -100 if self.ignore_index is None else self.ignore_index
            weight, bias = self.linear.weight, self.linear.bias
            if self.out_features:
                shape, features = tuple(floating("input", input).shape), self.linear.in_features
                if len(shape) != 2 or shape[1] != features:
                    raise ValueError(f"input: got shape {shape}, with out_features needs (N, {features})")
                logits = torch.nn.functional.linear(input, weight, bias)
                logits = logits.reshape(shape[0], self.num_classes, *self.out_features)
                return functional.cross_entropy(logits, target, self.weight, **options)
            options |= {"class_weight": self.weight, "chunk_tokens": self.chunk_tokens}
            return functional.linear_cross_entropy(input, weight, target, bias, **options)

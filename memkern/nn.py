"""The fused layers as modules: subclasses of torch's own, so that everything built on those still works."""

from __future__ import annotations

import torch
from torch import Tensor

from memkern import functional
from memkern.functional.common import one_of
from memkern.functional.gelu import GELU_FORMS


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

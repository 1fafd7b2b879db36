"""The Triton backend: for a GPU with no compiled library, of any maker Triton drives.

Kernels also run in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1), so they use no libdevice
and no methods on scalar arguments, take sizes at run time, and round to bf16 by hand there.
"""

from __future__ import annotations

from torch.library import triton_op

from memkern import ops
from memkern.backends import interpreting
from memkern.triton import gelu, norm

FAMILIES = (gelu, norm)


def register() -> None:
    """Define and implement the ops of namespace ``memkern_triton``."""
    for family in FAMILIES:
        for name, function in family.IMPLEMENTATIONS.items():
            if interpreting():  # kernels PyTorch cannot trace into
                ops.define("triton").impl(name, function, "CompositeExplicitAutograd")
            else:
                triton_op(f"memkern_triton::{name}", function, mutates_args=(), schema=ops.SCHEMAS[name])

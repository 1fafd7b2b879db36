"""The reference backend: every op in plain PyTorch, on any device. It says what the other backends compute.

Arithmetic is fp64 where the device has it, else (MPS) fp32.
"""

from __future__ import annotations

from memkern import ops
from memkern.reference import cross_entropy, gelu, norm, optim, softmax

FAMILIES = (cross_entropy, gelu, norm, optim, softmax)


def register() -> None:
    """Implement the ops of namespace ``memkern_reference``."""
    library = ops.define("reference")
    for family in FAMILIES:
        for name, function in family.IMPLEMENTATIONS.items():
            library.impl(name, function, "CompositeExplicitAutograd")

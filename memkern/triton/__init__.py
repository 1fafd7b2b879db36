"""The Triton backend: for a GPU with no compiled library, of any maker Triton drives.

Kernels also run in Triton's interpreter on CPU tensors (TRITON_INTERPRET=1), so they use no libdevice
and no methods on scalar arguments, take sizes at run time, and round to bf16 by hand there.
"""

from __future__ import annotations

import torch
from torch.library import custom_op, triton_op

from memkern import ops
from memkern.backends import interpreting
from memkern.triton import cross_entropy, gelu, norm, optim, softmax

FAMILIES = (cross_entropy, gelu, norm, optim, softmax)
UNTRACEABLE = (optim,)  # it reads addresses, which a tensor has none of while PyTorch traces it


def register() -> None:
    """Define and implement the ops of namespace ``memkern_triton``."""
    for family in FAMILIES:
        for name, function in family.IMPLEMENTATIONS.items():
            if interpreting():  # kernels PyTorch cannot trace into
                ops.define("triton").impl(name, function, "CompositeExplicitAutograd")
                continue
            schema = ops.SCHEMAS[name]
            if family in UNTRACEABLE:
                op = custom_op(f"memkern_triton::{name}", function, mutates_args=_mutated(schema), schema=schema)
                op.register_fake(ops.FAKES[name])
            else:
                triton_op(f"memkern_triton::{name}", function, mutates_args=_mutated(schema), schema=schema)


def _mutated(schema: str) -> list[str]:
    """The names of the arguments that an op writes to."""
    arguments = torch._C.parse_schema(f"op{schema}").arguments
    return [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]

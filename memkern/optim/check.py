"""The pass over all gradients that comes before a step: are they finite, and how long are they together?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memkern import backends, ops


class Check(NamedTuple):
    """What the pass found: fp32 scalars on one device.

    Args:
        found_inf: not 0 where a gradient, divided by the loss scale, is not finite, or that scale is 0 or not finite.
        norm: L2 norm of all gradients, divided by the loss scale.
        clip: the factor that brings the norm down to ``max_norm``, at most 1.
    """

    found_inf: Tensor
    norm: Tensor
    clip: Tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _shard_groups(tensor: Any) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over whose ranks a DTensor is split; none for any other tensor."""
    if not hasattr(tensor, "to_local"):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(tensor.placements) if placement.is_shard())


def check(grads: Iterable[Tensor], grad_scale: Tensor | None, max_norm: float) -> Check:
    """Read every gradient once. Gradients split over ranks (DTensor) are checked and measured as a whole.

    Args:
        grads: at least one, on any devices.
        grad_scale: the loss scale in them, a scalar tensor, or None.
        max_norm: see :class:`Check`; infinity for no clipping.
    """
    parts = defaultdict(list)
    for grad in grads:
        piece = local(grad)
        parts[piece.device, backends.choose(piece), _shard_groups(grad)].append(piece)
    results = [
        (groups, ops.op(backend, "check_and_norm")(pieces, on(device, grad_scale), max_norm))
        for (device, backend, groups), pieces in parts.items()
    ]
    if len(results) == 1 and not results[0][0]:
        return Check(*results[0][1].unbind())
    device = results[0][1].device
    parts_summed = [_summed_over_ranks(result, groups).to(device) for groups, result in results]
    found_inf, square = torch.stack(parts_summed).sum(0)
    norm = square.sqrt().float()
    return Check(found_inf.float(), norm, (max_norm / (norm + 1e-6)).nan_to_num(nan=1.0).clamp(max=1.0))


def _summed_over_ranks(result: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
    """(found_inf, norm^2), summed: whoever finds an infinity, all ranks skip."""
    part = result[:2].double()
    part[1].square_()
    for group in groups:
        dist.all_reduce(part, group=group)
    return part


def on(device: torch.device, value: Tensor | None) -> Tensor | None:
    """A scalar tensor as the ops want it: fp32, on the device that reads it."""
    return None if value is None else value.to(device, torch.float32, non_blocking=True)

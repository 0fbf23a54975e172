"""Point to point between the ranks of one axis.

Shapes are known at both ends and messages carry no tag: what keeps them apart is their order, which whoever plans the
messages makes the same at both ends. Nothing is received "from anyone": Gaudi's HCCL cannot.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis


def start_send(x: Tensor, axis: Axis, peer: int) -> Pending:
    """Begin to send ``x`` to position ``peer`` of the axis; ``x`` must not change before ``wait``."""
    x = x.contiguous()
    return Pending(x, dist.isend(x, axis.ranks[peer], group=axis.group))


def start_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, axis: Axis, peer: int) -> Pending:
    """Begin to receive a tensor from position ``peer`` of the axis."""
    out = torch.empty(shape, dtype=dtype, device=device)
    return Pending(out, dist.irecv(out, axis.ranks[peer], group=axis.group))

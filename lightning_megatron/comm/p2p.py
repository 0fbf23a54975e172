"""Point-to-point communication between the ranks of one axis.

Both ends know the shapes. Messages carry no tag: they are matched by their order, which callers must keep equal at both
ends. There is no receive from an arbitrary rank, which Gaudi's HCCL does not support.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.file_format import Kind


def start_send(x: Tensor, axis: Axis, peer: int) -> Pending:
    """Begin to send ``x`` to position ``peer`` of the axis; ``x`` must not change before ``wait``."""
    x = x.contiguous()
    call = axis.call(Kind.SEND, x, axis.ranks[peer])
    return Pending(x, call.issue(dist.isend, x, axis.ranks[peer], group=axis.group), call)


def start_receive(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, axis: Axis, peer: int) -> Pending:
    """Begin to receive a tensor from position ``peer`` of the axis."""
    out = torch.empty(shape, dtype=dtype, device=device)
    call = axis.call(Kind.RECEIVE, out, axis.ranks[peer])
    return Pending(out, call.issue(dist.irecv, out, axis.ranks[peer], group=axis.group), call)


def send(x: Tensor, axis: Axis, peer: int) -> None:
    """Send ``x`` to position ``peer`` of the axis, and wait until it is sent."""
    axis.call(Kind.SEND, x, axis.ranks[peer]).run(dist.send, x, axis.ranks[peer], group=axis.group)


def receive(out: Tensor, axis: Axis, peer: int) -> None:
    """Fill ``out`` with the tensor that position ``peer`` of the axis sends."""
    axis.call(Kind.RECEIVE, out, axis.ranks[peer]).run(dist.recv, out, axis.ranks[peer], group=axis.group)


def greet_neighbours(axis: Axis, device: torch.device, is_ring: bool, rotates: bool = False) -> None:
    """Send this rank's position to the next one on the axis, and check the one received.

    Some backends connect each pair of ranks at its first message. Even positions send first, so that nobody waits in a
    circle if a send blocks until its receive is posted.

    Args:
        axis: the axis, of at least two ranks.
        device: device of the messages.
        is_ring: True if the last position sends to the first one.
        rotates: True if messages on this axis are those of :func:`start_rotation`.

    Raises:
        RuntimeError: if a message is wrong.
    """
    own, found = (torch.full((1,), float(axis.rank), device=device) for _ in range(2))
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if rotates:
        found = start_rotation(own, axis).wait()
    for sends in () if rotates else (axis.rank % 2 == 0, axis.rank % 2 == 1):
        if sends and (is_ring or after):
            send(own, axis, after)
        elif not sends and (is_ring or axis.rank):
            receive(found, axis, before)
    if (is_ring or axis.rank) and found.item() != before:
        raise RuntimeError(
            f"the first message over {axis.name} is wrong: rank {axis.ranks[before]} sent {before}, and "
            f"{found.item():g} has come. The network or a device is at fault, not the model"
        )


def as_bytes(x: Tensor) -> Tensor:
    """Bytes of a tensor, flat: a view of a contiguous tensor on the host, otherwise a copy on the host."""
    flat = x.detach().cpu().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


class Rotation:
    """A running ring shift: a send to the next rank and a receive of the same shape from the previous one."""

    def __init__(self, sent: Pending, received: Pending) -> None:
        self._sent, self._received = sent, received

    def wait(self) -> Tensor:
        """Wait for both and return the received tensor; afterwards the sent tensor may be changed."""
        self._sent.wait()
        return self._received.wait()


def start_rotation(x: Tensor, axis: Axis) -> Rotation:
    """Begin to send ``x`` to the next position on the axis, from the last to the first.

    Even positions send first and odd positions receive first, so that there is no deadlock even if a send blocks until
    its receive is posted. Two ranks exchange in one call: NCCL has one stream for single messages of a pair, where a
    send and a receive follow each other. ``x`` must not change before ``wait``.
    """
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if after == before:
        return _start_exchange(x.contiguous(), axis, after)
    if axis.rank % 2 == 0:
        sent = start_send(x, axis, after)
        return Rotation(sent, start_receive(tuple(x.shape), x.dtype, x.device, axis, before))
    received = start_receive(tuple(x.shape), x.dtype, x.device, axis, before)
    return Rotation(start_send(x, axis, after), received)


def _start_exchange(x: Tensor, axis: Axis, peer: int) -> Rotation:
    out, other = torch.empty_like(x), axis.ranks[peer]
    sent, received = axis.call(Kind.SEND, x, other), axis.call(Kind.RECEIVE, out, other)
    messages = [dist.P2POp(operation, y, other, axis.group) for operation, y in ((dist.isend, x), (dist.irecv, out))]
    works = sent.issue(received.issue, dist.batch_isend_irecv, messages)  # one for both where the backend joins them
    return Rotation(Pending(x, works[0], sent), Pending(out, works[-1], received))

"""Collectives over one :class:`~lightning_megatron.mesh.Axis`, plain and with gradients.

Only SUM and MAX are used: Gaudi's HCCL has no AVG, so callers divide to get a mean. Functions without ``in_place`` or
``into`` in their name do not change their input, and are the identity on an axis of size 1, so layers need not check
for it. Those with ``in_place`` communicate on any axis; an axis without a group stands for all ranks.

The pairs with gradients are the ``f``/``g`` of Megatron-LM (https://arxiv.org/abs/1909.08053, section 3), their
sequence-parallel forms (https://arxiv.org/abs/2205.05198, section 4.2.2), and all-to-all, which is its own pair.
Shapes: ``S`` is the whole sequence, ``R`` the size of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.device import collective_traits
from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind

# torch 2.13 renamed these two functions and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OverAxis = Callable[[Tensor, Axis], Tensor]


class TorchWork(Protocol):
    """The part of ``torch.distributed.Work`` that is used."""

    def wait(self) -> Any: ...  # noqa: D102
    def is_completed(self) -> bool: ...  # noqa: D102


class Pending:
    """A running collective: :meth:`wait` returns its result.

    Args:
        result: tensor that is complete after the wait.
        work: handle of the collective; ``None`` if the result is complete already.
        call: record of the collective.
        finish: function that completes the result after the wait.
    """

    def __init__(
        self,
        result: Tensor,
        work: TorchWork | None = None,
        call: Call | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._result = result
        self._work = work
        self._call = call
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait until the result is complete (on an accelerator: until the current stream may use it).

        Raises:
            PeerLostError: if the collective fails because of another rank.
        """
        work, self._work = self._work, None
        if work is not None:
            with self._call or nullcontext():
                work.wait()
            if self._finish is not None:
                self._finish()
                self._finish = None  # it holds the received tensor
        return self._result

    def is_done(self) -> bool:
        """True if the result is ready."""
        return self._work is None or self._work.is_completed()


MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


def _start(kind: Kind, axis: Axis, result: Tensor, function: Callable[..., dist.Work | None], *args: Any) -> Pending:
    call = axis.call(kind, result)
    return Pending(result, call.issue(function, *args, group=axis.group, async_op=True), call)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Begin the sum of ``x`` over the axis."""
    if axis.size == 1:
        return Pending(x)
    return start_all_reduce_in_place(x.clone(memory_format=torch.contiguous_format), axis)


def start_all_reduce_in_place(x: Tensor, axis: Axis, operation: Any = SUM) -> Pending:
    """Begin the sum, or another reduction, of ``x`` over the axis into ``x``."""
    return _start(Kind.ALL_REDUCE, axis, x, dist.all_reduce, x, operation)


def all_reduce_in_place(x: Tensor, axis: Axis, operation: Any = SUM) -> Tensor:
    """Reduce ``x`` over the axis into ``x``, which is returned."""
    axis.call(Kind.ALL_REDUCE, x).run(dist.all_reduce, x, operation, group=axis.group)
    return x


def broadcast_in_place(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Broadcast ``x`` from position ``source`` of the axis into ``x``, which is returned."""
    axis.call(Kind.BROADCAST, x).run(dist.broadcast, x, axis.ranks[source], group=axis.group)
    return x


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Begin ``[n, ...] -> [R n, ...]``: the pieces of all ranks, by position on the axis."""
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if collective_traits(x.device).copies_pieces:
        local_shard(out, axis).copy_(x.detach())
        return start_all_gather_in_place(out, axis)
    return _start(Kind.ALL_GATHER, axis, out, _all_gather_single, out, x.contiguous())


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Begin ``[R n, ...] -> [n, ...]``: this rank's piece of the sum over the axis."""
    if axis.size == 1:
        return Pending(x)
    if x.shape[0] % axis.size:
        raise ValueError(f"reduce-scatter over {axis.name}: {x.shape[0]} rows do not split over {axis.size} ranks")
    return start_reduce_scatter_into(x.new_empty((x.shape[0] // axis.size, *x.shape[1:])), x.contiguous(), axis)


def start_reduce_scatter_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin ``[R n, ...] -> [n, ...]`` into a given tensor, on an axis of several ranks.

    Args:
        out: ``[n, ...]``; may be this rank's own piece of ``x``.
        x: ``[R n, ...]``, contiguous; must not change before ``wait``.
    """
    if not collective_traits(x.device).copies_pieces:
        return _start(Kind.REDUCE_SCATTER, axis, out, _reduce_scatter_single, out, x)
    received = torch.empty_like(x)  # one piece from each rank

    def add_up() -> None:
        first, second, *others = received.unflatten(0, (axis.size, out.shape[0]))
        torch.add(first, second, out=out)
        for other in others:  # in the order of ranks, so that sums are the same every time
            out.add_(other)

    call = axis.call(Kind.REDUCE_SCATTER, out)
    work = call.issue(dist.all_to_all_single, received, x, group=axis.group, async_op=True)
    return Pending(out, work, call, add_up)


class _All:
    """Several collectives as one."""

    def __init__(self, works: Sequence[TorchWork]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """True if all are done."""
        return all(work.is_completed() for work in self._works)


def start_all_gather_in_place(whole: Tensor, axis: Axis) -> Pending:
    """Begin to fill ``[R n, ...]``, of which each rank has its own piece, with the pieces of all ranks.

    Args:
        whole: contiguous tensor; its piece at this rank's position is sent.
        axis: the ranks, at least two.
    """
    pieces = whole.unflatten(0, (axis.size, whole.shape[0] // axis.size))
    if not collective_traits(whole.device).copies_pieces:
        return _start(Kind.ALL_GATHER, axis, whole, _all_gather_single, whole, pieces[axis.rank])
    call = axis.call(Kind.ALL_GATHER, whole)
    return Pending(whole, call.issue(_broadcast_each, pieces, axis), call)


def _broadcast_each(pieces: Tensor, axis: Axis) -> _All:
    pairs = zip(pieces, axis.ranks, strict=True)
    return _All([dist.broadcast(piece, rank, group=axis.group, async_op=True) for piece, rank in pairs])


@torch.compiler.disable  # one graph break here instead of several inside
def _complete(start: Callable[[Tensor, Axis], Pending], x: Tensor, axis: Axis) -> Tensor:
    return start(x, axis).wait()


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum of ``x`` over the axis, a new tensor; no gradient."""
    return x if axis.size == 1 else _complete(start_all_reduce, x, axis)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """``[n, ...] -> [R n, ...]``; no gradient."""
    return x if axis.size == 1 else _complete(start_all_gather, x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """``[R n, ...] -> [n, ...]``, summed; no gradient."""
    return x if axis.size == 1 else _complete(start_reduce_scatter, x, axis)


def all_to_all_no_grad(
    x: Tensor, axis: Axis, input_splits: Sequence[int] | None = None, output_splits: Sequence[int] | None = None
) -> Tensor:
    """``[sum of input_splits, ...] -> [sum of output_splits, ...]``: one piece for each rank; no gradient.

    Arguments are those of :func:`all_to_all`.
    """
    if axis.size == 1:
        return x
    if input_splits is None and x.shape[0] % axis.size:
        raise ValueError(f"all-to-all over {axis.name}: {x.shape[0]} rows do not split over {axis.size} ranks")
    rows = x.shape[0] if output_splits is None else sum(output_splits)
    out = x.new_empty((rows, *x.shape[1:]))
    sent, received = (None if splits is None else list(splits) for splits in (input_splits, output_splits))
    call = axis.call(Kind.ALL_TO_ALL, out)
    call.run(dist.all_to_all_single, out, x.contiguous(), received, sent, group=axis.group)
    return out


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over the axis, a new tensor; no gradient."""
    return x if axis.size == 1 else all_reduce_in_place(x.clone(), axis, MAX)


def local_shard(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's equal slice of ``x`` along ``dim``, a view.

    Raises:
        ValueError: if ``dim`` does not split evenly.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(f"dimension {dim} of length {x.shape[dim]} does not split over {axis.name}={axis.size}")
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _own_sequence(x: Tensor, axis: Axis) -> Tensor:
    return local_shard(x, axis).contiguous()


def _own_features(x: Tensor, axis: Axis) -> Tensor:
    return local_shard(x, axis, dim=-1).contiguous()


def _all_features(x: Tensor, axis: Axis) -> Tensor:
    return torch.cat(all_gather(x.unsqueeze(0), axis).unbind(0), dim=-1)


def _as_it_is(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    """A communicating function, and the one that its backward applies to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: _OverAxis, backward: _OverAxis) -> Tensor:
        ctx.axis, ctx.backward_over = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_over(grad, ctx.axis), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, input_splits: Sequence[int] | None, output_splits: Sequence[int] | None
    ) -> Tensor:
        ctx.axis, ctx.input_splits, ctx.output_splits = axis, input_splits, output_splits
        return all_to_all_no_grad(x, axis, input_splits, output_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_no_grad(grad, ctx.axis, ctx.output_splits, ctx.input_splits), None, None, None


def _apply(x: Tensor, axis: Axis, forward: _OverAxis, backward: _OverAxis) -> Tensor:
    return x if axis.size == 1 else _outside_of_graphs(x, axis, forward, backward)


@torch.compiler.disable  # one graph break here instead of one for every function around the collective
def _outside_of_graphs(x: Tensor, axis: Axis, forward: _OverAxis, backward: _OverAxis) -> Tensor:
    out: Tensor = _Pair.apply(x, axis, forward, backward)
    return out


def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    """``f``: identity forward, all-reduce backward. Enters a region where each rank does part of the work."""
    return _apply(x, axis, _as_it_is, all_reduce)


def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    """``g``: all-reduce forward, identity backward. Leaves such a region with the whole result on every rank."""
    return _apply(x, axis, all_reduce, _as_it_is)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """``[S/R, ...] -> [S, ...]`` for a consumer that does different work on each rank; backward reduce-scatters."""
    return _apply(x, axis, all_gather, reduce_scatter)


def join_sequence(x: Tensor, axis: Axis) -> Tensor:
    """``[S/R, ...] -> [S, ...]`` for a consumer that does the same work on all ranks; backward slices."""
    return _apply(x, axis, all_gather, _own_sequence)


def reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """``[S, ...] -> [S/R, ...]``, summed over ranks; backward gathers."""
    return _apply(x, axis, reduce_scatter, all_gather)


def gather_features(x: Tensor, axis: Axis) -> Tensor:
    """``[..., F/R] -> [..., F]`` for a consumer that does the same work on all ranks; backward slices."""
    return _apply(x, axis, _all_features, _own_features)


def split_features(x: Tensor, axis: Axis) -> Tensor:
    """``[..., F] -> [..., F/R]`` of a tensor that is equal on all ranks; backward gathers."""
    return _apply(x, axis, _own_features, _all_features)


def all_to_all(
    x: Tensor, axis: Axis, input_splits: Sequence[int] | None = None, output_splits: Sequence[int] | None = None
) -> Tensor:
    """All-to-all: piece ``j`` of ``x`` goes to rank ``j``; the pieces received are concatenated in the order of ranks.

    Args:
        x: ``[n, ...]``, split along its first dimension.
        input_splits: number of rows for each rank, possibly 0; ``None`` for equal pieces.
        output_splits: number of rows from each rank (the entry for this rank in the other's ``input_splits``); ``None``
            for equal pieces.

    Returns:
        ``[sum of output_splits, ...]``. The backward pass is the reverse all-to-all.
    """
    if axis.size == 1:
        return x
    out: Tensor = _AllToAll.apply(x, axis, input_splits, output_splits)
    return out

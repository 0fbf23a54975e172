"""Objects between ranks: tensors travel as tensors, the rest pickled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.recorder.form import Kind


def broadcast_object(value: Any, axis: Axis, source: int, device: torch.device) -> Any:
    """Give every rank of the axis what its position ``source`` has; tensors inside arrive on ``device``.

    Args:
        value: tensors and anything picklable, in dicts, lists and tuples; ignored elsewhere than at the source.
        axis: who takes part.
        source: position on the axis.
        device: whose tensors the backend moves.
    """
    if axis.size == 1:
        return value
    tensors: list[Tensor] = []
    origin = axis.ranks[source]
    box = [_take(value, tensors) if axis.rank == source else None]
    axis.call(Kind.BROADCAST_OBJECT).run(dist.broadcast_object_list, box, origin, group=axis.group, device=device)
    if axis.rank != source:
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in _slots(box[0])]
    for tensor in tensors:
        axis.call(Kind.BROADCAST, tensor).run(dist.broadcast, tensor, origin, group=axis.group)
    return value if axis.rank == source else _put(box[0], iter(tensors))


class _Slot:
    """The place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _take(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().contiguous())
        return _Slot(value)
    if isinstance(value, dict):
        return {key: _take(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, tensors) for item in value)
    return value


def _slots(value: Any) -> list[_Slot]:
    if isinstance(value, _Slot):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [slot for item in items for slot in _slots(item)]


def _put(value: Any, tensors: Any) -> Any:
    if isinstance(value, _Slot):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _put(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put(item, tensors) for item in value)
    return value

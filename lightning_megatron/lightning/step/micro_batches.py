"""Splitting a batch into micro-batches, and joining their outputs.

A DataLoader batch is what one data-parallel replica trains on in one step. The strategy cuts it along the first
dimension of its tensors. Other objects go to every micro-batch as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor


def batch_size_of(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor in ``batch``; ``None`` if there is no tensor.

    Raises:
        MisconfigurationException: if tensors disagree.
    """
    sizes = {x.shape[0] for x in _tensors(batch) if x.ndim > 0}
    if len(sizes) > 1:
        raise MisconfigurationException(
            f"tensors of the batch differ in their first dimension ({sorted(sizes)}), so it cannot be cut into"
            " micro-batches: give every tensor the samples first, or leave micro_batch_size out"
        )
    return sizes.pop() if sizes else None


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [t for value in batch.values() for t in _tensors(value)]
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [t for value in batch for t in _tensors(value)]
    return []


def split_batch(batch: Any, size: int | None) -> list[tuple[Any, float]]:
    """Micro-batches of ``size`` samples, the last one perhaps shorter, each with its share of the batch.

    Args:
        batch: tensors in mappings and sequences, samples first.
        size: samples of a micro-batch; ``None`` for the whole batch in one.

    Returns:
        Pairs of a micro-batch and its weight; weights sum to 1.
    """
    if size is None:
        return [(batch, 1.0)]
    total = batch_size_of(batch)
    if total is None or total <= size:
        return [(batch, 1.0)]
    return [
        (_rows(batch, start, min(start + size, total)), (min(start + size, total) - start) / total)
        for start in range(0, total, size)
    ]


def _rows(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim > 0 else batch
    if isinstance(batch, Mapping):
        rows = {key: _rows(value, start, stop) for key, value in batch.items()}
        return rows if type(batch) is dict else type(batch)(rows)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(value, start, stop) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_rows(value, start, stop) for value in batch)
    return batch


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: tensors and lists end to end, mappings and tuples item by item."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: join_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        joined = [join_outputs(parts) for parts in zip(*outputs, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    return None if first is None else list(outputs)

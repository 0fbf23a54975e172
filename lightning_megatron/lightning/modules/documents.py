"""Documents of a batch: checks of the keys that a user gives, and their conversion for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.documents import NO_DOCUMENT, Documents, segments_of_bounds
from lightning_megatron.errors import DataError

KEYS = ("segment_ids", "cu_seqlens")
SEGMENTS, BOUNDS = KEYS
OF_DECODERS = dict.fromkeys(
    KEYS, "documents of a sequence are kept apart by decoders alone: give one document a sample"
)
"""Advice for the keys of documents, from models that cannot keep them apart."""
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def says_documents(batch: Any) -> bool:
    """True if a batch says where documents are."""
    return isinstance(batch, Mapping) and any(batch.get(key) is not None for key in KEYS)


def document_fault(batch: Any) -> str | None:
    """Describe what is wrong with the documents of a batch; ``None`` if nothing is, or if there are no tokens.

    Only what is on the host is read.
    """
    if not says_documents(batch) or not isinstance(batch.get("tokens"), Tensor) or batch["tokens"].ndim != 2:
        return None
    given = [key for key in KEYS if batch.get(key) is not None]
    if len(given) > 1:
        return f"batch has both {SEGMENTS!r} and {BOUNDS!r}: they say the same, leave one of them out"
    (key,), shape = given, tuple(batch["tokens"].shape)
    value = batch[key]
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        return f"batch[{key!r}] is {kind}: it must be a tensor of integers"
    if not value.is_cpu:
        return None
    return _segments_fault(value, shape) if key == SEGMENTS else _bounds_fault(value, shape)


def _segments_fault(ids: Tensor, shape: tuple[int, ...]) -> str | None:
    if tuple(ids.shape) != shape:
        return f"batch[{SEGMENTS!r}] has shape {list(ids.shape)}, and 'tokens' {list(shape)}: each token has one id"
    if ids.numel() and int(ids.min()) < 0:
        row, column = (ids < 0).nonzero()[0].tolist()
        return (
            f"batch[{SEGMENTS!r}][{row}, {column}] is {int(ids[row, column])}: documents have ids from 1, and padding"
            f" {NO_DOCUMENT}"
        )
    for number, row_ids in enumerate(ids):
        if (fault := _again(number, row_ids)) is not None:
            return fault
    return None


def _again(number: int, ids: Tensor) -> str | None:
    """Fault of a sequence in which the tokens of a document are not contiguous."""
    runs, lengths = ids.unique_consecutive(return_counts=True)
    named = runs[runs != NO_DOCUMENT]
    if len(named) == len(named.unique()):
        return None
    seen: set[int] = set()
    place = 0
    for run, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        if run in seen:
            earlier = int((ids == run).nonzero()[0])
            return (
                f"batch[{SEGMENTS!r}][{number}, {place}] is {run}, and document {run} began at {earlier} and has ended"
                " since: tokens of a document are neighbours, and two documents of a sequence have two ids"
            )
        seen |= {run} - {NO_DOCUMENT}
        place += length
    raise AssertionError("a repeated id has a second run")


def _bounds_fault(bounds: Tensor, shape: tuple[int, ...]) -> str | None:
    batch, length = shape
    fits = len(bounds) == batch if bounds.ndim == 2 else bounds.ndim == 1 and batch == 1
    if not fits or bounds.shape[-1] < 2:
        single = " (or [n + 1] for a single sequence)"
        return (
            f"batch[{BOUNDS!r}] has shape {list(bounds.shape)}: it must be [{batch}, n + 1]{single}, for each sequence"
            f" 0, the end of each document, and at last {length}, which may be repeated"
        )
    for row, ends in enumerate(bounds.reshape(-1, bounds.shape[-1])):
        where = f"batch[{BOUNDS!r}]{f'[{row}]' if bounds.ndim == 2 else ''}"
        if int(ends[0]) != 0:
            return f"{where} begins with {int(ends[0])}: the first document begins at 0"
        if bool((ends.diff() < 0).any()):
            place = int((ends.diff() < 0).nonzero()[0]) + 1
            return (
                f"{where} falls from {int(ends[place - 1])} to {int(ends[place])}: ends of documents must not decrease"
            )
        if int(ends[-1]) != length:
            return (
                f"{where} ends at {int(ends[-1])}, and the sequence has {length} tokens: the last document ends with"
                f" it, and padding is marked by {SEGMENTS!r}"
            )
    return None


def with_segments(batch: Any) -> Any:
    """The batch with its documents as segment ids, a row a sequence, so that it can be cut into micro-batches."""
    if not says_documents(batch) or batch.get(BOUNDS) is None or document_fault(batch) is not None:
        return batch
    ids = segments_of_bounds(batch[BOUNDS], batch["tokens"].shape[1])
    return {key: value for key, value in batch.items() if key != BOUNDS} | {SEGMENTS: ids}


def without_documents(batch: Any) -> Any:
    """The batch without its keys for documents."""
    return {key: value for key, value in batch.items() if key not in KEYS}


def documents_of(batch: Mapping[str, Any]) -> Documents | None:
    """Documents of a batch that has no fault on the host; ``None`` if it has no keys for them.

    Ids on a device are copied to the host and checked here.

    Raises:
        DataError: for faults of ids on a device.
    """
    if not says_documents(batch):
        return None
    given = {key: batch[key] for key in KEYS if batch.get(key) is not None}
    on_host = {key: value.cpu() for key, value in given.items()} | {"tokens": batch["tokens"]}
    is_checked = all(value.is_cpu for value in given.values())
    if not is_checked and (fault := document_fault(on_host)) is not None:
        raise DataError(fault)
    return Documents.of_segments(with_segments(on_host)[SEGMENTS])

"""Splitting a batch into micro-batches, and joining their outputs.

A DataLoader batch is what one data-parallel replica trains on in one step. The strategy cuts everything in it that
holds one entry for each sample. Numbers, texts and other single objects go to every micro-batch as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_megatron.lightning.streams.containers import entries_of, is_ordered, sequence_like, with_values


class _Cut(Enum):
    """A way to cut a part of a batch."""

    WHOLE = auto()  # every micro-batch gets it
    SAMPLES = auto()  # one entry for each sample
    FIELDS = auto()  # a container of such parts
    ODD = auto()  # neither


def split_batch(batch: Any, size: int | None, batch_size: int | None = None) -> list[tuple[Any, float]]:
    """Micro-batches of ``size`` samples, the last one perhaps shorter, each with its share of the batch.

    Args:
        batch: tensors, arrays and lists of samples, in mappings, sequences, dataclasses and objects with ``to``.
        size: samples of a micro-batch; ``None`` for the whole batch in one.
        batch_size: samples of a batch, as its loader or data module declares them; ``None`` if unknown.

    Returns:
        Pairs of a micro-batch and its weight; weights sum to 1.

    Raises:
        MisconfigurationException: if an entry of the batch has another length than the others.
    """
    if size is None:
        return [(batch, 1.0)]
    total = num_samples(batch, batch_size, size)
    if total is None or total <= size:
        return [(batch, 1.0)]
    bounds = [(start, min(start + size, total)) for start in range(0, total, size)]
    return [(_rows(batch, start, stop, total), (stop - start) / total) for start, stop in bounds]


def num_samples(batch: Any, batch_size: int | None, size: int) -> int | None:
    """Samples of a batch, on which its parts agree; ``None`` if nothing in it has a length.

    A loader's last batch may be shorter than ``batch_size``. A loader with ``batch_size=1`` may pass ready batches on.

    Raises:
        MisconfigurationException: naming the entries that do not fit.
    """
    arrays, lists = _lengths(batch)
    lengths = [*arrays, *lists]
    if not lengths:
        if batch_size is not None and batch_size > size:
            raise MisconfigurationException(f"the batch, a {type(batch).__name__}, {_ADVICE.format(size)}")
        return None
    if max(lengths) <= size:  # one micro-batch, however the parts may be read
        return max(lengths)
    known = batch_size if batch_size is not None and batch_size > 1 else None
    most = known or max(lengths)
    for candidates in ([most] if known else [], arrays, lists):
        fitting = {n for n in candidates if n <= most and _cut_of(batch, n, "batch") in (_Cut.SAMPLES, _Cut.FIELDS)}
        if len(fitting) == 1:
            return fitting.pop()
        if fitting:
            found = " or ".join(map(str, sorted(fitting)))
            raise MisconfigurationException(f"the batch may hold {found} samples: it {_ADVICE.format(size)}")
    raise MisconfigurationException(f"{_misfit(batch, most, arrays, lists)}, {_ADVICE.format(size)}")


def _misfit(batch: Any, most: int, arrays: list[int], lists: list[int]) -> str:
    """The entries of a batch that do not fit the number of its samples, ``most`` at the most."""
    lengths = [*arrays, *lists]
    expected = most if most in lengths else max(arrays or lists, key=lengths.count)
    if expected > most or not (odd := _odd(batch, expected, "batch")):
        odd, expected = [("batch", expected)], most
    named = ", ".join(f"{name} has length {length}" for name, length in odd[:4])
    return f"a batch of {expected} samples, in which {named}"


_ADVICE = (
    "cannot be cut into micro-batches of {}: give every entry one item for each sample, first, and what all samples"
    " share as single numbers, texts or 0-dimensional tensors; let the loader say its batch_size; or leave"
    " micro_batch_size out"
)


def _odd(value: Any, total: int, name: str) -> list[tuple[str, int]]:
    """Names and lengths of the parts of a batch that cannot be cut; of a list, if none of its entries can."""
    entries = entries_of(value, name)
    if _cut_of(value, total, name if name == "batch" else "") is not _Cut.ODD:
        return []
    found = [part for its_name, _, item in entries or () for part in _odd(item, total, its_name)]
    fit = any(_cut_of(item, total) in (_Cut.SAMPLES, _Cut.FIELDS) for _, _, item in entries or ())
    if entries is None or not found or (is_ordered(value) and not fit):
        return [(name, len(value) if entries is not None else _length(value) or 0)]
    return found


def _lengths(value: Any) -> tuple[list[int], list[int]]:
    """Lengths of all tensors and arrays, and of all lists."""
    entries = entries_of(value)
    if entries is None:
        length = _length(value)
        return [] if length is None else [length], []
    parts = [_lengths(item) for _, _, item in entries]
    own = [len(entries)] if is_ordered(value) and entries else []
    return [n for arrays, _ in parts for n in arrays], own + [n for _, lists in parts for n in lists]


def _length(value: Any) -> int | None:
    """Length of the first dimension of an array or a tensor, or of a table; ``None`` for a single object."""
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    is_table = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return len(value) if is_table and not isinstance(value, str | bytes) else None


def _cut_of(value: Any, total: int, name: str = "") -> _Cut:
    """The way to cut a part of a batch of ``total`` samples."""
    entries = entries_of(value)
    if entries is None:
        length = _length(value)
        return _Cut.WHOLE if length is None else _Cut.SAMPLES if length == total else _Cut.ODD
    cuts = {_cut_of(item, total) for _, _, item in entries}
    if is_ordered(value) and entries:
        return _cut_of_list(value, total, name, cuts)
    return _Cut.ODD if _Cut.ODD in cuts else _Cut.FIELDS if _have_fields(cuts) else _Cut.WHOLE


def _cut_of_list(items: Sequence[Any], total: int, name: str, cuts: set[_Cut]) -> _Cut:
    """The way to cut a list, by the ways to cut its entries.

    A list of as many entries as samples may also be a list of fields, as DataLoader gives for tuples of tensors: at the
    top of a batch, or if its entries differ in kind. Elsewhere it could be both, and so is odd.
    """
    has_fields = _have_fields(cuts)
    is_record = bool(name) and _are_mixed(items)
    if len(items) == total and not is_record and (not has_fields or _Cut.WHOLE in cuts):
        return _Cut.SAMPLES
    if len(items) == total > 1 and not (name or _are_mixed(items)):
        return _Cut.ODD
    return _Cut.FIELDS if has_fields else _Cut.ODD


def _have_fields(cuts: set[_Cut]) -> bool:
    return bool(cuts & {_Cut.SAMPLES, _Cut.FIELDS}) and _Cut.ODD not in cuts


def _are_mixed(items: Sequence[Any]) -> bool:
    """True if entries differ in type, dtype or the shape of a sample, as fields do and samples do not."""
    kinds = {(type(x), getattr(x, "dtype", None), tuple(getattr(x, "shape", ()))[1:]) for x in items}
    return len(kinds) > 1


def _rows(value: Any, start: int, stop: int, total: int, name: str = "batch") -> Any:
    cut = _cut_of(value, total, name)
    if cut is _Cut.FIELDS:
        return with_values(value, [_rows(item, start, stop, total, "") for _, _, item in entries_of(value) or ()])
    if cut is not _Cut.SAMPLES:
        return value
    if isinstance(value, Tensor) and value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        return value.index_select(0, torch.arange(start, stop, device=value.device))
    return sequence_like(value, value[start:stop]) if is_ordered(value) else value[start:stop]


def join_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Join the outputs of micro-batches to what the whole batch would have given.

    Tensors, arrays and lists are put end to end, containers joined entry by entry. A number, or a tensor without
    dimensions, is a mean over samples if it is floating, and else a count, which is summed.

    Args:
        outputs: outputs of the micro-batches.
        weights: share of each micro-batch in the batch.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else _number(torch.stack(list(outputs)), weights)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(outputs)
    if isinstance(first, int | float | np.number | np.ndarray) and not isinstance(first, bool):
        return _like(first, _number(torch.as_tensor(np.stack(outputs)), weights).numpy())
    if entries_of(first) is None:
        return first if all(type(x) is type(first) and x == first for x in outputs) else list(outputs)
    return _join_containers(outputs, weights)


def _like(first: Any, joined: np.ndarray) -> Any:
    """A number of the type of ``first``."""
    if isinstance(first, np.ndarray):
        return joined
    return joined.astype(first.dtype)[()] if isinstance(first, np.generic) else type(first)(joined)


def _join_containers(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    first = outputs[0]
    if is_ordered(first) and _holds_samples(outputs):
        return sequence_like(first, list(chain(*outputs)))
    columns = zip(*([item for _, _, item in entries_of(output) or ()] for output in outputs), strict=True)
    return with_values(first, [join_outputs(column, weights) for column in columns])


def _holds_samples(outputs: Sequence[Any]) -> bool:
    """True if lists or tuples hold an entry for each sample, and not fields: a record of tensors or numbers."""
    first = outputs[0]
    if len({len(output) for output in outputs}) > 1 or all(isinstance(x, str) for x in first):
        return True
    is_record = _are_mixed(first) and len({_length(item) for item in first} - {None}) == 1
    return isinstance(first, list) and not is_record


def _number(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Weighted mean of floating values, sum of others; ``values [n]``, without dimensions in the result."""
    if values.dtype == torch.bool:
        return values.all()
    if not (values.is_floating_point() or values.is_complex()):
        return values.sum(dtype=values.dtype)
    shares = torch.tensor(weights, device=values.device, dtype=torch.float64 if values.dtype == torch.float64 else None)
    return (values * shares).sum().to(values.dtype)

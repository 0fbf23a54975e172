"""Documents packed into a batch: their bounds, and attention that does not cross them.

Several documents are packed into one sequence, one after another. Attention across documents is not masked but never
computed: each kernel call takes all documents of one length as a batch. No mask ``[S, S]`` exists, and no work is
spent on masked scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.device import compiles_fixed_shapes, copy_to_device
from lightning_megatron.errors import Problem

NO_DOCUMENT = 0
"""Segment id of padding."""

Span = tuple[int, int]


class DocumentBlock(NamedTuple):
    """The queries of one document, and the keys that they attend to.

    Attributes:
        sequence: number of the sequence in the batch.
        queries: slice of the queries.
        keys: slice of the keys.
        first_query: position of the first query among these keys.
    """

    sequence: int
    queries: slice
    keys: slice
    first_query: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of queries, number of keys, position of the first query; blocks of one shape share one call."""
        lengths = (part.stop - part.start for part in (self.queries, self.keys))
        return *lengths, self.first_query


@dataclass(eq=False)  # torch.compile of torch 2.11 makes a graph for each value of a frozen one
class Documents:
    """Documents of a batch. Their bounds are on the host, so that nothing waits for a device.

    Attributes:
        spans: first token and end of each document, in order, for each sequence; other tokens are padding.
        length: number of tokens of a sequence.
        plans: cached token orders of attention, which all layers and recomputation share.
    """

    spans: tuple[tuple[Span, ...], ...]
    length: int
    plans: dict[object, _Plan] = field(default_factory=dict, repr=False)

    @classmethod
    def of_segments(cls, segment_ids: Tensor) -> Documents:
        """Documents of ``[B, S]`` ids: tokens of one document have one id, and are neighbours; 0 is padding."""
        return cls(tuple(tuple(_spans(row)) for row in segment_ids.cpu()), segment_ids.shape[1])

    @property
    def is_one_each(self) -> bool:
        """True if every sequence is one whole document, as in a batch without document bounds."""
        return all(row == ((0, self.length),) for row in self.spans)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return max((end - first for row in self.spans for first, end in row), default=0)

    @property
    def has_padding(self) -> bool:
        """True if any token is in no document."""
        return self.num_tokens < self.length * len(self.spans)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are in a document."""
        return sum(end - first for row in self.spans for first, end in row)

    def positions(self) -> Tensor:
        """``[B, S]`` on the host: the place of each token in its document, 0 for padding."""
        found = torch.zeros(len(self.spans), self.length, dtype=torch.int64)
        for row, spans in zip(found, self.spans, strict=True):
            for first, end in spans:
                row[first:end] = torch.arange(end - first)
        return found

    def tokens(self) -> Tensor:
        """``[B, S]`` bool on the host: True for tokens that are in a document."""
        return self.together(0)

    def together(self, places: int) -> Tensor:
        """``[B, S]`` bool on the host: True where the token ``places`` later belongs to the same document."""
        return torch.arange(places, self.length + places) < self.ends()

    def ends(self) -> Tensor:
        """``[B, S]`` on the host: the end of each token's document, 0 for padding."""
        found = torch.zeros(len(self.spans), self.length, dtype=torch.int64)
        for row, spans in zip(found, self.spans, strict=True):
            for first, end in spans:
                row[first:end] = end
        return found

    def meetings(self, queries: range, keys: range) -> Iterator[DocumentBlock]:
        """Causal blocks of the documents that have both queries and keys in these ranges of positions."""
        for sequence, spans in enumerate(self.spans):
            for first, end in spans:
                begin, stop = max(first, queries.start), min(end, queries.stop)
                earliest, last = max(first, keys.start), min(stop, keys.stop)
                if begin < stop and earliest < last:
                    yield DocumentBlock(
                        sequence,
                        slice(begin - queries.start, stop - queries.start),
                        slice(earliest - keys.start, last - keys.start),
                        begin - earliest,
                    )


def segments_of_bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    """Segment ids ``[B, S]`` from the bounds of documents, ``[n + 1]`` of a single sequence or ``[B, n + 1]``.

    A bound that is repeated is no document, so that sequences may have different numbers of them.
    """
    bounds = cu_seqlens.reshape(-1, cu_seqlens.shape[-1])
    places = torch.arange(length, device=bounds.device).expand(len(bounds), -1).contiguous()
    return torch.searchsorted(bounds.contiguous(), places, right=True)


def device_problem(key: str, device: torch.device) -> Problem | None:
    """The reason why a kind of device cannot keep documents apart; ``None`` if it can.

    Args:
        key: key of the batch that says where documents are.
        device: device of the model.
    """
    if not compiles_fixed_shapes(device):
        return None
    reason = (
        "FusedSDPA takes no document bounds, and on Gaudi every new document length would compile a new graph:"
        " give one document per sample, padded at its end, or train on another kind of device"
    )
    return Problem(f"batch[{key!r}]", "given", reason)


class _Plan(NamedTuple):
    """Order in which attention takes the tokens, as indices on a device.

    Attributes:
        queries: ``[n]`` row indices into ``[S B, ...]``, call after call.
        keys: ``[m]`` likewise.
        calls: queries, keys and position of the first query of a document, and number of documents, of each call.
        bounds: bounds of the calls' queries and keys, ``[calls + 1]`` int32 each; empty where no kernel takes them.
    """

    queries: Tensor
    keys: Tensor
    calls: tuple[tuple[tuple[int, int, int], int], ...]
    bounds: tuple[Tensor, ...]

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Rows of queries, keys and values in the order of the calls."""
        # Each operand is gathered once, so its backward is one scatter; a slice per document adds up full gradients.
        pairs = (q, self.queries), (k, self.keys), (v, self.keys)
        return [x.flatten(0, 1).index_select(0, rows) for x, rows in pairs]

    def scatter(self, rows: Tensor, length: int, batch: int) -> Tensor:
        """``[S, B, ...]`` from rows in the order of the queries; 0 for padding."""
        out = rows.new_zeros(length * batch, *rows.shape[1:]).index_copy(0, self.queries, rows)
        return out.unflatten(0, (length, batch))


@torch.compiler.disable  # lengths differ from batch to batch: each would be a graph of its own
def attend_documents(
    core: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    first_query: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside of each document.

    Args:
        core: causal attention of whole sequences, a function of queries, keys, values and the position of the first
            query among the keys.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, V]``.
        documents: documents of the batch; tokens after the end of their sequences are padding.
        first_query: position of the first query among the keys.
        sinks: sinks that ``core`` adds, ``[N]``; they get a gradient also if there are no documents.

    Returns:
        ``[S, B, N, V]``, 0 for padding.
    """
    length, batch = q.shape[:2]
    plan = _plan(documents, range(first_query, first_query + length), len(k), q.device)
    if not plan.calls:
        return _nothing(q, k, v, sinks)
    parts = plan.gather(q, k, v)
    q_sizes, k_sizes = ([shape[side] * count for shape, count in plan.calls] for side in (0, 1))
    of_calls = (part.split(sizes) for part, sizes in zip(parts, (q_sizes, k_sizes, k_sizes), strict=True))
    outs = []
    for ((_, _, first), count), *rows in zip(plan.calls, *of_calls, strict=True):
        beside = (x.unflatten(0, (-1, count)) for x in rows)  # [L, documents, heads, D]
        outs.append(core(*beside, first).flatten(0, 1))
    return plan.scatter(torch.cat(outs), length, batch)


def attend_at_once(
    kernel: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    first_query: int = 0,
) -> Tensor:
    """:func:`attend_documents` by one call of a kernel that takes the bounds of all documents.

    Args:
        kernel: function of queries, keys and values ``[tokens, heads, features]``, bounds of the documents' queries
            and keys, ``[n + 1]`` int32, and the largest numbers of queries and keys. The last query of a document is
            aligned with its last key.
        q: ``[S, B, N, D]``.
        k: ``[T, B, G, D]``.
        v: ``[T, B, G, V]``.
        documents: documents of the batch.
        first_query: position of the first query among the keys.
    """
    length, batch = q.shape[:2]
    plan = _plan(documents, range(first_query, first_query + length), len(k), q.device, together=False)
    if not plan.calls:
        return _nothing(q, k, v, None)
    longest = (max(shape[side] for shape, _ in plan.calls) for side in (0, 1))
    return plan.scatter(kernel(*plan.gather(q, k, v), *plan.bounds, *longest), length, batch)


def _plan(documents: Documents, queries: range, keys: int, device: torch.device, together: bool = True) -> _Plan:
    """Plan for a range of queries and the first ``keys`` keys.

    Args:
        documents: documents of the batch.
        queries: positions of the queries.
        keys: number of keys.
        device: device of the indices.
        together: True for one call for each shape of a block, False for documents one after another.
    """
    asked = queries, keys, device, together
    if asked not in documents.plans:
        by_shape: dict[tuple[int, ...], list[DocumentBlock]] = {}
        for number, meeting in enumerate(documents.meetings(queries, range(keys))):
            by_shape.setdefault(meeting.shape if together else (number,), []).append(meeting)
        batch = len(documents.spans)
        of_queries = [_rows([(m.queries, m.sequence) for m in same], batch) for same in by_shape.values()]
        of_keys = [_rows([(m.keys, m.sequence) for m in same], batch) for same in by_shape.values()]
        calls = tuple((same[0].shape, len(same)) for same in by_shape.values())
        none = torch.zeros(0, dtype=torch.int64)
        queries_first, keys_first = (copy_to_device(torch.cat([none, *rows]), device) for rows in (of_queries, of_keys))
        lengths = torch.tensor([(0, 0), *(shape[:2] for shape, _ in calls)], dtype=torch.int32)
        bounds = (
            () if together else copy_to_device(lengths.cumsum(0, dtype=torch.int32).t().contiguous(), device).unbind()
        )
        documents.plans[asked] = _Plan(queries_first, keys_first, calls, bounds)
    return documents.plans[asked]


def _rows(parts: Sequence[tuple[slice, int]], batch: int) -> Tensor:
    """Row indices into ``[S B, ...]`` of equally long parts of sequences: first token of each part, then second, ..."""
    firsts = torch.tensor([part.start * batch + sequence for part, sequence in parts])
    length = parts[0][0].stop - parts[0][0].start
    return (torch.arange(length)[:, None] * batch + firsts).flatten()


def _nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Zeros ``[S, B, N, V]`` that depend on every operand, so that each gets a gradient."""
    none = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
    if sinks is not None:
        none = none + sinks.sum() * 0
    return none.to(v.dtype).expand(*q.shape[:-1], v.shape[-1])


def _spans(row: Tensor) -> Iterator[Span]:
    """First token and end of each run of one id in ``[S]``, without padding."""
    if not len(row):
        return
    changes = (row.diff() != 0).nonzero().flatten().add(1).tolist()
    bounds = [0, *changes, len(row)]
    for (first, end), number in zip(pairwise(bounds), row[bounds[:-1]].tolist(), strict=True):
        if number != NO_DOCUMENT:
            yield first, end

"""Rows of packed conversations as a data set."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.cache import Arrays, cached_arrays, mapped_files, picklable, unpickled
from lightning_megatron.data.chat.encoded import EncodedChats
from lightning_megatron.data.chat.packing import best_fit
from lightning_megatron.data.chat.selection import LengthRule, repeated, usable

NO_LABEL = -100
"""Label of a token that no token of the same document follows."""

_NAMES = ("members", "ends")


@dataclass(frozen=True)
class Packing:
    """Arguments of the rows of one split.

    Attributes:
        rule: length of a row, and what happens to longer conversations.
        weights: weight of each file; ``None`` reads all conversations once.
        seed: seed of all random draws.
        pad_id: token of the padding.
        cache_dir: folder of the stored rows; ``None`` for one beside the first file.
    """

    rule: LengthRule
    weights: Sequence[float] | None = None
    seed: int = 1234
    pad_id: int = 0
    cache_dir: Path | None = None


@dataclass(frozen=True)
class PackReport:
    """Counts of what has been packed.

    Attributes:
        conversations: conversations in the rows, including repetitions.
        rows: rows.
        tokens: tokens of the conversations in the rows.
        answer_tokens: those of these tokens that are learnt.
        seq_length: tokens of a row.
        cut: conversations of the files that were cut.
        dropped: conversations left out as too long.
        unanswered: conversations left out because the cut took every answer.
    """

    conversations: int
    rows: int
    tokens: int
    answer_tokens: int
    seq_length: int
    cut: int = 0
    dropped: int = 0
    unanswered: int = 0

    @property
    def efficiency(self) -> float:
        """Share of the rows that is not padding."""
        return self.tokens / (self.rows * self.seq_length) if self.rows else 0.0

    def __str__(self) -> str:
        text = (
            f"{self.conversations} conversations in {self.rows} rows of {self.seq_length} tokens: "
            f"{self.efficiency:.1%} of them filled, {self.answer_tokens} of {self.tokens} tokens learnt"
        )
        counts = {
            "too long and cut": self.cut,
            "too long and dropped": self.dropped,
            "dropped, since the cut took every answer": self.unanswered,
        }
        return "; ".join([text, *(f"{count} {what}" for what, count in counts.items() if count)])


class PackedChats(Dataset[dict[str, Tensor]]):
    """Rows of conversations, packed by best fit; the rows are the same under every layout.

    An item is a dict of ``tokens``, ``labels``, ``segment_ids`` (int64) and ``loss_mask`` (float32), each
    ``[seq_length]``. Documents are numbered from 1 in ``segment_ids``, padding is 0. A label is the next token of the
    same document, and the loss mask is 1 where the assistant has written the label.

    Args:
        chats: conversations of the files.
        numbers: numbers of the conversations to read, for each file.
        packing: arguments of the rows.

    Attributes:
        report: counts of what has been packed.

    Raises:
        DataError: naming a conversation that is too long, where that is an error.
    """

    def __init__(self, chats: Sequence[EncodedChats], numbers: Sequence[NDArray[np.int64]], packing: Packing) -> None:
        self._chats, self._packing = list(chats), packing
        longest = packing.rule.longest
        found = [usable(one, of_one, packing.rule) for one, of_one in zip(chats, numbers, strict=True)]
        places = repeated([len(one.numbers) for one in found], packing.weights, packing.seed)
        self._starts = np.cumsum([0, *map(len, chats)])
        documents = np.concatenate(
            [start + one.numbers[of_one] for start, one, of_one in zip(self._starts[:-1], found, places, strict=True)]
        )
        lengths = np.minimum(np.concatenate([one.lengths for one in chats]), longest)
        arrays = self._cached(documents, lengths[documents])
        self._members, self._ends = (arrays[name] for name in _NAMES)
        self._mapped = mapped_files(arrays.values())
        learnt = np.concatenate([one.learnt(longest) for one in chats])
        tokens = int(lengths[documents].sum()), int(learnt[documents].sum())
        left_out = (sum(getattr(one, name) for one in found) for name in ("cut", "dropped", "unanswered"))
        self.report = PackReport(len(documents), len(self), *tokens, longest, *left_out)

    def __len__(self) -> int:
        return len(self._ends)

    def documents(self, item: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Documents of a row in order: their tokens, and True for those that the assistant has written."""
        self._mapped.check()
        return [self._document(member) for member in self._members_of(item)]

    def __getitem__(self, item: int | None) -> dict[str, Tensor]:
        """Row ``item``, or one of padding alone for ``None``.

        Raises:
            IndexError: if there is no such row.
        """
        if item is not None and not 0 <= item < len(self):
            raise IndexError(f"there are {len(self)} rows, and none has the number {item}")
        size = self._packing.rule.longest
        tokens = np.full(size, self._packing.pad_id, np.int64)
        labels, segments = np.full(size, NO_LABEL, np.int64), np.zeros(size, np.int64)
        mask = np.zeros(size, np.float32)
        start = 0
        for number, (ids, is_answer) in enumerate([] if item is None else self.documents(item), 1):
            end = start + len(ids)
            tokens[start:end], segments[start:end] = ids, number
            labels[start : end - 1], mask[start : end - 1] = ids[1:], is_answer[1:]
            start = end
        row = {"tokens": tokens, "labels": labels, "loss_mask": mask, "segment_ids": segments}
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def place(self, item: int) -> list[tuple[Path, int]]:
        """File and line of each document of a row."""
        return [(chats.path, chats.line(number)) for chats, number in map(self._located, self._members_of(item))]

    def _members_of(self, item: int) -> list[int]:
        begin, end = int(self._ends[item - 1]) if item else 0, int(self._ends[item])
        return [int(member) for member in self._members[begin:end]]

    def _located(self, member: int) -> tuple[EncodedChats, int]:
        file = int(np.searchsorted(self._starts, member, side="right")) - 1
        return self._chats[file], member - int(self._starts[file])

    def _document(self, member: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        chats, number = self._located(member)
        longest = self._packing.rule.longest
        return chats.tokens(number)[:longest], chats.is_answer(number)[:longest]

    def _cached(self, documents: NDArray[np.int64], lengths: NDArray[np.int64]) -> Arrays:
        description = {
            "class": "PackedChats",
            "documents_crc32": zlib.crc32(documents.tobytes()),
            "lengths_crc32": zlib.crc32(lengths.tobytes()),
            "documents": len(documents),
            "seed": self._packing.seed,
            "seq_length": self._packing.rule.longest,
        }

        def build() -> Arrays:
            members, ends = best_fit(lengths, self._packing.rule.longest, self._packing.seed)
            return {"members": documents[members], "ends": ends}

        beside = self._chats[0].path.parent / "cache" / "chats"
        return cached_arrays(self._packing.cache_dir, beside, "rows", _NAMES, description, build)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_members": picklable(self._members), "_ends": picklable(self._ends)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _members=unpickled(state["_members"]), _ends=unpickled(state["_ends"]))

"""Selection of the conversations to train on: shares of files, a share for validation, and those too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.blend import normalized
from lightning_megatron.data.chat.encoded import EncodedChats
from lightning_megatron.errors import DataError

TooLong = Literal["error", "cut", "drop"]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class LengthRule:
    """Rule for conversations that are longer than a row.

    Attributes:
        longest: tokens of a row.
        too_long: ``"error"``, ``"cut"`` at the end of the row, or ``"drop"``.
    """

    longest: int
    too_long: TooLong


@dataclass(frozen=True)
class Usable:
    """Conversations of a file that fit into a row, some of them after a cut.

    Attributes:
        numbers: their numbers in the file.
        cut: number of those that are cut.
        dropped: number of conversations that are left out as too long.
        unanswered: number of those left out because the cut takes every answer.
    """

    numbers: Numbers
    cut: int = 0
    dropped: int = 0
    unanswered: int = 0


def usable(chats: EncodedChats, numbers: Numbers, rule: LengthRule) -> Usable:
    """Apply the rule for long conversations to some conversations of a file.

    Raises:
        DataError: naming file and line of the longest one, where it may not be cut or dropped.
    """
    lengths = chats.lengths[numbers]
    long = lengths > rule.longest
    count = int(long.sum())
    if not count:
        return Usable(numbers)
    if rule.too_long == "error":
        worst = int(numbers[lengths.argmax()])
        others = f", the longest of {count} that are too long" if count > 1 else ""
        fault = f"a conversation of {lengths.max()} tokens{others} for seq_length={rule.longest}"
        do = 'raise seq_length, or set too_long="cut" or too_long="drop"'
        raise DataError.at(chats.path, fault, line=chats.line(worst), do=do)
    if rule.too_long == "drop":
        return Usable(numbers[~long], dropped=count)
    answered = chats.learnt(rule.longest)[numbers] > 0
    kept = numbers[answered]
    return Usable(kept, cut=int((long & answered).sum()), unanswered=len(numbers) - len(kept))


def held_out(count: int, share: float, seed: int) -> tuple[Numbers, Numbers]:
    """Numbers of the conversations of a file for training and for validation, each in the file's order.

    Args:
        count: conversations of the file.
        share: share for validation; of a file with at least two, each gets at least one.
        seed: seed of the draw.
    """
    if not share or count < 2:
        return np.arange(count), np.arange(0)
    size = min(max(1, round(count * share)), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def repeated(sizes: Sequence[int], weights: Sequence[float] | None, seed: int) -> list[Numbers]:
    """Places of the conversations of each file that one epoch reads.

    Without weights, each is read once. Weights are the shares of the files: the file with the smallest share for its
    size is read once, those of the others several times; within a file these counts differ by at most one.

    Args:
        sizes: usable conversations of each file.
        weights: weight of each file.
        seed: seed of the draw of conversations that are read one extra time.
    """
    if weights is None:
        return [np.arange(size) for size in sizes]
    present = [(size, weight) for size, weight in zip(sizes, weights, strict=True) if size]
    shares = normalized([weight for _, weight in present])
    total = max(size / share for (size, _), share in zip(present, shares, strict=True))
    counts = iter([max(size, round(total * share)) for (size, _), share in zip(present, shares, strict=True)])
    return [_times(size, next(counts), seed + number) if size else np.arange(0) for number, size in enumerate(sizes)]


def _times(size: int, count: int, seed: int) -> Numbers:
    whole, rest = divmod(count, size)
    more = np.random.default_rng(seed).permutation(size)[:rest]
    return np.sort(np.concatenate([np.tile(np.arange(size), whole), more]))

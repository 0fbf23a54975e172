"""Long texts as windows of a fixed length, and windows as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from lightning_megatron.layers.cross_entropy import IGNORE_INDEX

T = TypeVar("T")

_MULTIPLE = 64
"""Lengths of batches are multiples of this, so that a device gets few different shapes."""


@dataclass(frozen=True)
class Window:
    """Tokens of a text that one forward sees.

    Attributes:
        tokens: the tokens; the last one is only predicted.
        asked: number of tokens at the end that are predicted here.
    """

    tokens: Sequence[int]
    asked: int


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    """Windows in which every token but the first is predicted once.

    The first window predicts all that it can. Each further one begins ``stride`` tokens later, and predicts the tokens
    that no window before it has reached. So a token has at least ``length - stride`` tokens before it, or all there
    are: Megatron-LM's rule for overlapping evaluation.

    Args:
        tokens: tokens of the text.
        length: tokens that the model sees at once.
        stride: tokens by which windows are shifted, at most ``length``.
    """
    reached = 0
    for start in range(0, max(len(tokens) - 1, 0), stride):
        window = tokens[start : start + length + 1]
        end = start + len(window) - 1
        if end > reached:
            yield Window(window, end - reached)
        reached = max(reached, end)
        if end == len(tokens) - 1:
            return


def collate(found: Sequence[Window], longest: int) -> dict[str, Tensor]:
    """``tokens`` and ``labels`` ``[B, S]``; shorter windows are padded at the end, without labels there.

    Args:
        found: the windows.
        longest: largest number of tokens that the model may see.
    """
    needed = max(len(window.tokens) - 1 for window in found)
    width = max(min(-(-needed // _MULTIPLE) * _MULTIPLE, longest), needed)
    tokens = torch.zeros(len(found), width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, window in enumerate(found):
        ids = torch.as_tensor(window.tokens)
        seen = len(ids) - 1
        tokens[row, :seen] = ids[:-1]
        labels[row, seen - window.asked : seen] = ids[len(ids) - window.asked :]
    return {"tokens": tokens, "labels": labels}


def groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last one may be shorter."""
    waiting = iter(items)
    while some := list(islice(waiting, size)):
        yield some

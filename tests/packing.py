"""Random packings of documents into sequences, and what each document gives on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_megatron import GPTModule, LlamaModule
from lightning_megatron.models.gpt import GPTModel

MICRO_BATCHES = 2


@dataclass(frozen=True)
class Packing:
    """Lengths of the documents of each sequence, in order; a negative one is padding.

    Attributes:
        rows: lengths, which add up to one number of tokens in every row.
        seed: seed of the tokens and of their weights.
        asked: document of each sequence that alone has a loss; ``None`` for a loss of all.
    """

    rows: tuple[tuple[int, ...], ...]
    seed: int
    asked: tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        return sum(abs(part) for part in self.rows[0])

    def spans(self, row: int) -> list[tuple[int, int]]:
        """First token and end of each document of a sequence."""
        found, place = [], 0
        for part in self.rows[row]:
            if part > 0:
                found.append((place, place + part))
            place += abs(part)
        return found

    def batch(self, vocabulary: int) -> dict[str, Tensor]:
        """The whole batch; what stands in the padding would count if it were read."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = len(self.rows), self.length
        tokens, labels = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
        weights = torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) > 0.2)
        segments = torch.zeros(shape, dtype=torch.int64)
        for row in range(len(self.rows)):
            for number, (first, end) in enumerate(self.spans(row)):
                segments[row, first:end] = 7 * number + 3  # ids need not follow one another
                if self.asked is not None and number != self.asked[row] % len(self.spans(row)):
                    weights[row, first:end] = 0.0
        return {"tokens": tokens, "labels": labels, "loss_mask": weights, "segment_ids": segments}

    def asked_for(self) -> Tensor:
        """``[B, S]`` bool, True for the tokens of the documents that have a loss."""
        assert self.asked is not None
        found = torch.zeros(len(self.rows), self.length, dtype=torch.bool)
        for row, number in enumerate(self.asked):
            spans = self.spans(row)
            if spans:
                first, end = spans[number % len(spans)]
                found[row, first:end] = True
        return found


@st.composite
def packings(draw: st.DrawFn, multiple: int = 1, sequences: int = 2 * MICRO_BATCHES) -> Packing:
    """Any packing, of sequences whose length is a multiple."""
    length = multiple * draw(st.integers(max(1, 4 // multiple), 24 // multiple))
    rows = []
    for _ in range(sequences):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
        bounds = [0, *cuts, length]
        parts = [end - first for first, end in pairwise(bounds)]
        if draw(st.booleans()):
            parts[draw(st.integers(0, len(parts) - 1))] *= -1
        rows.append(tuple(parts))
    asked = draw(st.none() | st.tuples(*(st.integers(0, 5) for _ in range(sequences))))
    return Packing(tuple(rows), draw(st.integers(0, 2**16)), asked)


def halves(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The micro-batches of a batch."""
    size = len(batch["tokens"]) // MICRO_BATCHES
    for first in range(0, len(batch["tokens"]), size):
        yield {key: value[first : first + size] for key, value in batch.items()}


def one_by_one(model: GPTModel, packing: Packing) -> dict[str, Tensor]:
    """Loss and gradients of the mean of micro-batches' losses, from a forward for each document, in one process."""
    model.zero_grad()
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for half, batch in enumerate(halves(packing.batch(model.config.vocab_size))):
        weight = (batch["loss_mask"] * (batch["segment_ids"] != 0)).sum()
        for row in range(len(batch["tokens"])):
            for first, end in packing.spans(half * len(batch["tokens"]) + row):
                alone = {key: batch[key][row : row + 1, first:end] for key in ("tokens", "labels", "loss_mask")}
                share = alone["loss_mask"].sum() / weight.clamp(min=1e-20) / MICRO_BATCHES
                if share:
                    loss = model(**alone) * share
                    loss.backward()
                    total += loss.detach()
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    return {"loss": total} | zeros | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


B, S, VOCAB = 2, 12, 40
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCAB}
SIZES |= {"max_position_embeddings": S, "init_std": 0.3}


def module_of(kind: type[GPTModule] = LlamaModule, preset: str = "llama-tiny", **more: Any) -> GPTModule:
    torch.manual_seed(1)
    module = kind(preset, **SIZES | more)
    module.configure_model()
    return module


def batch_of(**more: Any) -> dict[str, Any]:
    text = torch.randint(VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(2))
    return {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone()} | more

"""Generation in any layout: texts are continued token by token, each up to an end of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from lightning_megatron.layers.parts import Cache
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.models.generate import Sampling, choose
from lightning_megatron.tools.evaluation.ranks import Batch, Ranks
from lightning_megatron.tools.evaluation.steps import next_logits
from lightning_megatron.tools.evaluation.windows import groups

Ends = Callable[[Sequence[int]], bool]
"""True if a continuation is complete."""


def continuations(
    ranks: Ranks, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, ends: Ends
) -> list[list[int]]:
    """The continuation of each prompt, up to and including its end.

    Without pipeline and context parallelism, keys and values are cached, and prompts of equal length are continued
    together. Otherwise the whole texts are recomputed for each token.

    Args:
        ranks: the ranks; all of them call this with the same prompts.
        prompts: tokens of the prompts; none may be empty.
        count: maximum number of tokens to add.
        ends: function that tells whether a continuation is complete.
    """
    caching = ranks.mesh.layout.pp == ranks.mesh.layout.cp == 1
    found: list[list[int]] = [[] for _ in prompts]
    # All ranks of a replica choose the same tokens; ``Ranks.run`` sends them those of other replicas.
    generator = torch.Generator().manual_seed((sampling.seed or 0) + ranks.mesh.dp.rank)
    for some in _batches(prompts, ranks.rows, alike=caching):
        step = (_Cached if caching else _Whole)(sampling, generator)
        texts = [list(prompts[index]) for index in some]
        is_complete = [False] * len(some)
        for _ in range(count):
            chosen = ranks.run(step, step.batch(texts))["result"]
            for row, token in enumerate(chosen.flatten().tolist()):
                texts[row].append(token)
                if not is_complete[row]:
                    found[some[row]].append(token)
                    is_complete[row] = ends(found[some[row]])
            if all(is_complete):
                break
    return found


class _Whole:
    """The next token, computed from the whole text."""

    def __init__(self, sampling: Sampling, generator: torch.Generator) -> None:
        self._sampling, self._generator = sampling, generator

    def __call__(self, module: GPTModule, batch: Batch) -> Tensor:
        """Tokens ``[B, 1]``."""
        return self._choose(next_logits(module, batch))

    def batch(self, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Whole texts, padded at the end, which causal attention hides from the tokens."""
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        return {"tokens": tokens, "lengths": lengths}

    def _choose(self, logits: Tensor) -> Tensor:
        return choose(logits.cpu() if self._sampling.temperature else logits, self._sampling, self._generator)


class _Cached(_Whole):
    """The next token, computed from the one before it, and from cached keys and values.

    All texts have one length, and every call continues the same texts.
    """

    _caches: list[Cache] | None = None

    def __call__(self, module: GPTModule, batch: Batch) -> Tensor:
        """Tokens ``[B, 1]``."""
        model = module.model
        assert model is not None
        if self._caches is None:
            self._caches = model.new_caches()
        logits: Tensor = model(batch["tokens"], caches=self._caches)
        return self._choose(logits[:, -1].float())

    def batch(self, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The tokens that are not in the cache yet."""
        return {"tokens": torch.tensor([text if self._caches is None else text[-1:] for text in texts])}


def _batches(prompts: Sequence[Sequence[int]], size: int, *, alike: bool) -> Iterator[list[int]]:
    """Indices of prompts that are continued together: of equal length if ``alike``, else of similar lengths."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    if not alike:
        yield from groups(order, size)
        return
    for _, some in groupby(order, key=lambda index: len(prompts[index])):
        yield from groups(some, size)

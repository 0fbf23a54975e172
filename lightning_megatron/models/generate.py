"""Decoding text from a model, token by token, with cached keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.documents import Documents
from lightning_megatron.errors import ConfigError, Problem, raise_if_any
from lightning_megatron.layers.init import draw_seed
from lightning_megatron.models.gpt import GPTModel


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token, and the token that ends a sequence, as :func:`generate` takes them."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop: int | None = None
    seed: int | None = None

    def problems(self) -> list[Problem]:
        """Every value out of range."""
        found = []
        if self.temperature < 0:
            found.append(Problem("temperature", self.temperature, "must not be negative", (0.0,)))
        if self.top_k is not None and self.top_k < 1:
            found.append(Problem("top_k", self.top_k, "must be at least 1", (1, None)))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            found.append(Problem("top_p", self.top_p, "must be above 0 and at most 1", (1.0, None)))
        return found


@torch.no_grad()
def generate(
    model: GPTModel,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    seed: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Continue a batch of prompts.

    All tensor-parallel ranks call this together and get the same tokens: logits are whole on every rank, and sampling
    draws from a generator of its own.

    Args:
        model: model on any mesh without a pipeline.
        tokens: prompts ``[B, S]``.
        max_new_tokens: tokens to add at most.
        temperature: temperature of the softmax; 0 takes the likeliest token.
        top_k: number of likeliest tokens to sample from.
        top_p: total probability of the likeliest tokens to sample from (https://arxiv.org/abs/1904.09751).
        stop: token that ends a sequence; it is kept, and repeated while other sequences of the batch continue.
        seed: seed of the sampling; ``None`` draws one from torch's default generator, which is alike on all tp ranks.
        documents: documents of the prompts; the last one of each prompt is continued, and sees no other.

    Returns:
        ``[B, S + n]``, ``n <= max_new_tokens``.

    Raises:
        ConfigError: for arguments out of range, more tokens than the model has positions, or prompts that end in
            padding.
    """
    sampling = Sampling(temperature, top_k, top_p, stop, seed)
    if documents is not None:
        return _with_last_documents(model, tokens, max_new_tokens, sampling, documents)
    longest = model.config.max_position_embeddings
    raise_if_any(prompt_length_problems(tokens.shape[1], max_new_tokens, longest) + sampling.problems())
    was_training = model.training
    model.eval()
    caches = model.new_caches()
    try:
        return continued(lambda new: model(new, caches=caches), tokens, max_new_tokens, sampling)
    finally:
        model.train(was_training)


def _with_last_documents(
    model: GPTModel, tokens: Tensor, count: int, sampling: Sampling, documents: Documents
) -> Tensor:
    """Texts ``[B, S]``, each with a continuation of its last document; the model runs on these documents only.

    Documents of equal length are continued in one batch.
    """
    length = tokens.shape[1]
    ends = [spans[-1] if spans else (0, 0) for spans in documents.spans]
    padded = [row for row, (_, end) in enumerate(ends) if end != length]
    if padded:
        raise ConfigError([Problem("segment_ids", f"row {padded[0]}", "a prompt to continue must not end in padding")])
    new: list[Tensor] = [tokens[:0]] * len(ends)
    for first in sorted({first for first, _ in ends}):
        rows = [row for row, (begin, _) in enumerate(ends) if begin == first]
        found = generate(model, tokens[rows, first:], count, **asdict(sampling))
        for row, text in zip(rows, found[:, length - first :], strict=True):
            new[row] = text
    most = max(len(text) for text in new)  # a group that has stopped repeats its last token, as a row does in a group
    return torch.cat(
        (tokens, torch.stack([F.pad(x, (0, most - len(x)), value=sampling.stop or 0) for x in new])), dim=1
    )


def continued(logits_of: Callable[[Tensor], Tensor], tokens: Tensor, count: int, sampling: Sampling) -> Tensor:
    """Texts ``[B, S]``, continued by at most ``count`` tokens.

    Args:
        logits_of: function that takes the new tokens and returns the logits ``[B, 1, V]`` after the last one.
        tokens: texts.
        count: tokens to add at most.
    """
    generator = torch.Generator(device=tokens.device)
    generator.manual_seed(draw_seed() if sampling.seed is None else sampling.seed)
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    new, stop = tokens, sampling.stop
    for _ in range(count):
        new = choose(logits_of(new)[:, -1].float(), sampling, generator)
        if stop is not None:
            new = torch.where(done.unsqueeze(1), torch.full_like(new, stop), new)
            done |= new.squeeze(1) == stop
        tokens = torch.cat((tokens, new), dim=1)
        if stop is not None and bool(done.all()):
            break
    return tokens


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Next tokens ``[B, 1]`` from logits ``[B, V]``."""
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, index = probabilities.sort(descending=True)
        # Keep a token while the mass before it is below top_p: so the likeliest one is always kept.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)


def prompt_length_problems(length: int, new: int, longest: int | None = None) -> list[Problem]:
    """Faults of the length of prompts and of the number of tokens to add.

    Args:
        length: tokens of a prompt.
        new: tokens to add at most.
        longest: number of positions of the model; ``None`` for any number.
    """
    found = []
    if length < 1:
        found.append(Problem("tokens", length, "a prompt has at least one token"))
    if new < 1:
        found.append(Problem("max_new_tokens", new, "must be at least 1", (1,)))
    elif longest is not None and length + new > longest:
        reason = f"with a prompt of {length} tokens this is longer than max_position_embeddings={longest}"
        found.append(Problem("max_new_tokens", new, reason, (max(0, longest - length),)))
    return found

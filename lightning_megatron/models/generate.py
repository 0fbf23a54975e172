"""Decoding text from a model, token by token, with cached keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.layers.init import draw_seed
from lightning_megatron.models.gpt import GPTModel


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

    Returns:
        ``[B, S + n]``, ``n <= max_new_tokens``.

    Raises:
        ConfigError: for arguments out of range, or more tokens than the model has positions.
    """
    longest = model.config.max_position_embeddings
    raise_if_any(_problems(tokens.shape[1], max_new_tokens, temperature, top_k, top_p, longest))
    generator = torch.Generator(device=tokens.device)
    generator.manual_seed(draw_seed() if seed is None else seed)
    was_training = model.training
    model.eval()
    caches = [KVCache() for _ in model.layers]
    done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    new = tokens
    try:
        for _ in range(max_new_tokens):
            logits = model(new, caches=caches)[:, -1].float()
            new = _choose(logits, temperature, top_k, top_p, generator)
            if stop is not None:
                new = torch.where(done.unsqueeze(1), torch.full_like(new, stop), new)
                done |= new.squeeze(1) == stop
            tokens = torch.cat((tokens, new), dim=1)
            if stop is not None and bool(done.all()):
                break
    finally:
        model.train(was_training)
    return tokens


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Next tokens ``[B, 1]`` from logits ``[B, V]``."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ordered, index = probabilities.sort(descending=True)
        # Kept while the mass before a token is below top_p: the likeliest always is.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator)


def _problems(
    length: int, new: int, temperature: float, top_k: int | None, top_p: float | None, longest: int
) -> list[Problem]:
    found = []
    if length < 1:
        found.append(Problem("tokens", length, "a prompt has at least one token"))
    if new < 1:
        found.append(Problem("max_new_tokens", new, "must be at least 1", (1,)))
    elif length + new > longest:
        reason = f"with a prompt of {length} tokens this is longer than max_position_embeddings={longest}"
        found.append(Problem("max_new_tokens", new, reason, (max(0, longest - length),)))
    if temperature < 0:
        found.append(Problem("temperature", temperature, "must not be negative", (0.0,)))
    if top_k is not None and top_k < 1:
        found.append(Problem("top_k", top_k, "must be at least 1", (1, None)))
    if top_p is not None and not 0 < top_p <= 1:
        found.append(Problem("top_p", top_p, "must be above 0 and at most 1", (1.0, None)))
    return found

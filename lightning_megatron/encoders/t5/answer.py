"""Generation with T5: the decoder writes an answer to the text that the encoder reads."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.errors import raise_if_any
from lightning_megatron.models.generate import Sampling, continued, prompt_length_problems


@torch.no_grad()
def answer(
    model: T5Model,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    start: int,
    padding_mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | None = None,
    seed: int | None = None,
) -> Tensor:
    """Generate a text for each text of a batch; the encoder runs once.

    Args:
        model: model on any mesh without a pipeline.
        tokens: texts for the encoder, ``[B, S]``.
        max_new_tokens: tokens to write at most.
        start: token that begins the decoder's text.
        padding_mask: ``[B, S]``, 1 or True for tokens, 0 for padding; ``None`` for no padding.
        temperature: temperature of the softmax; 0 takes the likeliest token.
        top_k: number of likeliest tokens to sample from.
        top_p: total probability of the likeliest tokens to sample from.
        stop: token that ends a text; it is kept, and repeated while other texts of the batch continue.
        seed: seed of the sampling, as for :func:`~lightning_megatron.models.generate.generate`.

    Returns:
        ``[B, 1 + n]``, ``n <= max_new_tokens``; the first token is ``start``.

    Raises:
        ConfigError: for arguments out of range.
    """
    sampling = Sampling(temperature, top_k, top_p, stop, seed)
    raise_if_any(prompt_length_problems(tokens.shape[1], max_new_tokens) + sampling.problems())
    was_training = model.training
    model.eval()
    try:
        memory, caches = model.encode(tokens, padding_mask), model.caches()
        first = tokens.new_full((tokens.shape[0], 1), start)
        return continued(lambda new: model.decode(new, memory, caches), first, max_new_tokens, sampling)
    finally:
        model.train(was_training)

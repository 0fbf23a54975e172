"""Steps of evaluation: scores and next logits from one forward of a decoder."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.cross_entropy import IGNORE_INDEX
from lightning_megatron.lightning.modules.decoder import GPTModule
from lightning_megatron.tools.evaluation.ranks import Batch

_LOGITS = 1 << 26
"""Elements of the logits that are computed at once."""


def scores(module: GPTModule, batch: Batch) -> dict[str, Tensor]:
    """Losses ``[B, S]`` of ``labels``, and True for labels that are the likeliest token; 0 and True without a label.

    Args:
        batch: ``tokens`` and ``labels`` ``[B, S]``; few labels, since their full logits are computed.
    """
    labels = batch["labels"]
    asked = labels != IGNORE_INDEX
    hidden, targets = module.hidden(batch)[asked], labels[asked]
    loss = torch.zeros(labels.shape, device=labels.device)
    likeliest = torch.ones_like(asked)
    length = max(1, _LOGITS // module.config.vocab_size)
    chunks = (slice(start, start + length) for start in range(0, len(targets), length))
    found = [_of_chunk(module, hidden[some], targets[some]) for some in chunks]
    if found:
        loss[asked], likeliest[asked] = (torch.cat(each) for each in zip(*found, strict=True))
    return {"losses": loss, "likeliest": likeliest}


def next_logits(module: GPTModule, batch: Batch) -> Tensor:
    """Logits ``[B, V]``, fp32, of the token after the last one of each sample.

    Args:
        batch: ``tokens`` ``[B, S]``, padded at the end, and ``lengths`` ``[B]``.
    """
    hidden = module.hidden(batch)
    last = torch.arange(hidden.shape[0], device=hidden.device), batch["lengths"] - 1
    return _logits(module, hidden[last])


def _of_chunk(module: GPTModule, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = _logits(module, hidden)
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels


def _logits(module: GPTModule, hidden: Tensor) -> Tensor:
    """Logits ``[N, V]`` of hidden states ``[N, H]`` after the final norm."""
    model = module.model
    assert model is not None
    assert model.head is not None
    logits: Tensor = model.head(hidden.unsqueeze(1), model.tied_weight, is_final=True)
    return logits.squeeze(1).float()

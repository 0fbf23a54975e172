"""Comparison of a checkpoint's tensor sizes with the configuration of the model that loads them.

With it, the error for a wrong preset names the sizes that differ, not a long list of missing and unknown tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.checkpoint.tensors.lazy_tensor import LazyTensor
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


def size_problems(tensors: Mapping[str, LazyTensor], config: TransformerConfig) -> list[Problem]:
    """Fields of the configuration whose values the tensors, by the names of ``names.py``, contradict."""
    found = {
        "num_layers": _count(rf"{re.escape(LAYERS)}(\d+)\.", tensors),
        "num_experts": _count(r"\.mlp\.experts\.(\d+)\.", tensors),
    }
    embedding = tensors.get(_EMBEDDING)
    if embedding is not None:
        found["hidden_size"] = embedding.shape[1]
    problems = [
        Problem(name, getattr(config, name), f"the checkpoint has {there}", (there,))
        for name, there in found.items()
        if getattr(config, name) != there
    ]
    if embedding is not None and embedding.shape[0] < config.vocab_size:
        rows = embedding.shape[0]
        problems.append(Problem("vocab_size", config.vocab_size, f"the checkpoint has {rows} rows, padding included"))
    if embedding is not None and not config.tie_embeddings and _OUTPUT not in tensors:
        reason = f"the checkpoint has no {_OUTPUT}: its output layer is the embedding"
        problems.append(Problem("tie_embeddings", False, reason, (True,)))
    return problems


def _count(pattern: str, tensors: Mapping[str, LazyTensor]) -> int:
    return len({match[1] for name in tensors if (match := re.search(pattern, name))})

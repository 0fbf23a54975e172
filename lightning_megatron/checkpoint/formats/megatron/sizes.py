"""Sizes that a checkpoint's tensors show, against those of the model they are read into.

A wrong preset is told by its sizes: the names that are missing or too many in the end would be a long list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.checkpoint.formats.megatron.weight_map import MegatronShape
from lightning_megatron.checkpoint.lazy_tensor import LazyTensor
from lightning_megatron.errors import Problem

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


def size_problems(tensors: Mapping[str, LazyTensor], shape: MegatronShape) -> list[Problem]:
    """Fields of the model whose value the tensors contradict.

    Args:
        tensors: of the checkpoint, by the names of ``names.py``.
        shape: of the model.
    """
    found = {
        "num_layers": _count(rf"{re.escape(LAYERS)}(\d+)\.", tensors),
        "num_experts": _count(r"\.mlp\.experts\.(\d+)\.", tensors),
    }
    embedding = tensors.get(_EMBEDDING)
    if embedding is not None:
        found["hidden_size"] = embedding.shape[1]
    problems = [
        Problem(name, getattr(shape, name), f"the checkpoint has {there}", (there,))
        for name, there in found.items()
        if getattr(shape, name) != there
    ]
    if embedding is not None and embedding.shape[0] < shape.vocab_size:
        rows = embedding.shape[0]
        problems.append(Problem("vocab_size", shape.vocab_size, f"the checkpoint has {rows} rows, padding included"))
    if embedding is not None and not shape.tie_embeddings and _OUTPUT not in tensors:
        reason = f"the checkpoint has no {_OUTPUT}: its output layer is the embedding"
        problems.append(Problem("tie_embeddings", False, reason, (True,)))
    return problems


def _count(pattern: str, tensors: Mapping[str, LazyTensor]) -> int:
    return len({match[1] for name in tensors if (match := re.search(pattern, name))})

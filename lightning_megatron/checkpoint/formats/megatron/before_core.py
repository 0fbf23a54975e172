"""Megatron's models from before megatron-core, such as GPT-345M, renamed to the names of ``names.py``.

Such a file nests the model in dictionaries below ``language_model``, with other names for layers; ``output_layer`` is
beside the layers, and the last pipeline stage has a copy of a tied embedding, ``word_embeddings_for_head``. The row
order of queries, keys and values changed twice: ``checkpoint_version`` tells it, and is missing in the oldest files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from lightning_megatron.checkpoint.formats.megatron.names import LAYERS
from lightning_megatron.errors import CheckpointError

QKVOrder = Literal["head", "kind", "feature"]
"""Outermost to innermost, for 3 kinds, N heads and D features: ``head`` is ``[N, 3, D]``, as today; ``kind`` is
``[3, N, D]`` on each tensor-parallel rank (version 0), and ``feature`` is ``[N, D, 3]`` (version 1)."""

_MODEL = "language_model"
_DEPTH = 6  # of dictionaries in dictionaries
_STEMS = re.compile(r"(transformer|encoder)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_IN_A_LAYER = {
    "attention.query_key_value.": "self_attention.linear_qkv.",
    "attention.dense.": "self_attention.linear_proj.",
    "self_attention.query_key_value.": "self_attention.linear_qkv.",
    "self_attention.dense.": "self_attention.linear_proj.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    "input_norm.": "input_layernorm.",
    "post_attention_layernorm.": "pre_mlp_layernorm.",
    "post_attention_norm.": "pre_mlp_layernorm.",
}
_BESIDE_LAYERS = {"final_layernorm.": "decoder.final_layernorm.", "final_norm.": "decoder.final_layernorm."}
_OUTSIDE = {"word_embeddings_for_head.": "output_layer.", "lm_head.layernorm.": "lm_head.norm."}
_MASKS = ("attention.masked_bias", "attention.bias")


def is_before_core(model: Mapping[str, Any]) -> bool:
    """True if the model of a file is spelled as before megatron-core."""
    return any(name == _MODEL or name.startswith(f"{_MODEL}.") for name in model)


def core_names(model: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of such a model by the names of megatron-core; unknown names are kept.

    Args:
        model: the dictionary that a file holds, nested or flat.
    """
    return {
        core: tensor
        for name, tensor in _flat(model, "", _DEPTH)
        if (core := _core_name(name.removeprefix(f"{_MODEL}."))) is not None
    }


def qkv_order(content: Mapping[str, Any], file: object) -> QKVOrder:
    """The order of the rows of queries, keys and values in a file from before megatron-core.

    Raises:
        CheckpointError: for an unknown version.
    """
    version = content.get("checkpoint_version", 0)
    if isinstance(version, int | float) and not isinstance(version, bool):
        if version >= 2:
            return "head"
        if version in (0, 1):
            return "feature" if version else "kind"
    raise CheckpointError(f"{file}: checkpoint_version is {version!r}; Megatron's are 0, 1, and 2 or more")


def _flat(model: Mapping[str, Any], before: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.items():
        if torch.is_tensor(value):
            yield f"{before}{name}", value
        elif isinstance(value, Mapping) and depth:
            yield from _flat(value, f"{before}{name}.", depth - 1)


def _core_name(name: str) -> str | None:
    """The name in megatron-core; ``None`` for a constant mask, which the oldest files store."""
    stem = _STEMS.match(name)
    if stem is None:
        return _replaced(name, _OUTSIDE)
    inside = name[stem.end() :]
    layer = _LAYER.fullmatch(inside)
    if layer is None:
        return _replaced(inside, _BESIDE_LAYERS)
    return None if layer[2] in _MASKS else f"{LAYERS}{layer[1]}.{_replaced(layer[2], _IN_A_LAYER)}"


def _replaced(name: str, spellings: Mapping[str, str]) -> str:
    return next((new + name.removeprefix(old) for old, new in spellings.items() if name.startswith(old)), name)

"""Gemma 3, its text model: Gemma 2 with normed queries and keys, and another rotary base in layers with a window."""

from __future__ import annotations

from typing import Any

from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.rope import rope_of
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.rope_scaling import LinearScaling
from lightning_megatron.families.gemma2 import TENSORS as GEMMA2_TENSORS
from lightning_megatron.families.gemma2 import gemma_from_hf, gemma_recipe, gemma_to_hf
from lightning_megatron.families.llama import QK_NORMS

ARCHITECTURE = "Gemma3ForCausalLM"
_GLOBAL, _LOCAL = 1e6, 1e4
_KINDS = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    every = reader.get("sliding_window_pattern", 6)
    if every < 1:
        reader.refuse("sliding_window_pattern", every, "must be at least 1", (1,))
    found = gemma_from_hf(reader, lambda number: (number + 1) % max(every, 1) != 0, _angles)
    local = found["rope_local_theta"] if found.get("sliding_window") else 0.0
    return found | {"qk_norm": True, "rope_local_theta": local}


def _angles(reader: ConfigReader) -> dict[str, Any]:
    """Bases and scaling: of both kinds of layers in ``rope_parameters``, or by older names."""
    given = reader.get("rope_parameters", {}, null=True)
    outside = {name: reader.get(name, usual) for name, usual in zip(_KINDS.values(), (_GLOBAL, _LOCAL), strict=True)}
    scaling = reader.get("rope_scaling", {}, null=True)
    both = ConfigReader(given)
    parts = {kind: {"rope_theta": outside[name], **both.get(kind, {}, null=True)} for kind, name in _KINDS.items()}
    parts["full_attention"] |= scaling
    both.refuse_unread("no kind of layer")
    reader.take_over(both, "rope_parameters")
    source = "rope_scaling" if scaling else "rope_parameters.full_attention"
    found = rope_of(reader, source, parts["full_attention"])
    local = rope_of(reader, "rope_parameters.sliding_attention", parts["sliding_attention"])
    if scaled := local["rope_scaling"]:
        reason = "layers with a window have unscaled angles"
        reader.refuse("rope_parameters.sliding_attention.rope_type", scaled["kind"], reason, ("default",))
    return found | {"rope_local_theta": local["rope_theta"]}


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    reader.expect("qk_norm", None, (True,), f"not what {ARCHITECTURE} computes")
    written = gemma_to_hf(reader, ARCHITECTURE)
    if reader["sliding_window"] and reader["rope_scaling"] and not reader["rope_local_theta"]:
        reason = f"{ARCHITECTURE} scales no angles in layers with a window"
        reader.refuse("rope_local_theta", 0.0, reason, (reader["rope_theta"],))
    return written | {"rope_local_base_freq": reader["rope_local_theta"] or reader["rope_theta"]}


TENSORS = GEMMA2_TENSORS.plus(*QK_NORMS)


def _gemma3(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> Recipe:
    with_window = tuple(number for number in range(layers) if (number + 1) % 6)
    family = {"sliding_window_layers": with_window, "rope_theta": _GLOBAL, "rope_local_theta": _LOCAL, "qk_norm": True}
    return gemma_recipe(layers, hidden, heads, groups, ffn, vocab, positions, **family | other)


_LONG: dict[str, Any] = {"sliding_window": 1024, "rope_scaling": LinearScaling(8.0)}
_27B: dict[str, Any] = {"head_dim": 128, "attention_scale": 168**-0.5}
# config.json of https://huggingface.co/google/gemma-3-*, without the image encoder.
PRESETS = {
    "gemma3-tiny": _gemma3(6, 256, 8, 4, 1024, 32000, 2048, head_dim=32, sliding_window=128),
    "gemma3-1b": _gemma3(26, 1152, 4, 1, 6912, 262144, 32768, sliding_window=512),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 10240, 262208, 131072, **_LONG),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 15360, 262208, 131072, **_LONG),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 21504, 262208, 131072, **_LONG | _27B),
}

FAMILY = Family(
    "gemma3_text",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    passive=frozenset({"hidden_act", "cache_implementation"}),
)

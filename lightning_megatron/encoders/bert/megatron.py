"""BERT in checkpoints of Megatron-LM.

Its tensors beside the layers, by the names of ``checkpoint/formats/megatron/names.py``; all but the bias of the
vocabulary have our layout::

    embedding.tokentype_embeddings.weight       [T, H]
    lm_head.dense.weight, .bias                 [H, H], [H]; norm alike
    lm_head.bias                                [V padded]
    pooler.dense.weight, .bias                  [H, H], [H]
    binary_head.weight, .bias                   [2, H], [2]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.checkpoint.formats.megatron import MegatronCheckpoint
from lightning_megatron.checkpoint.formats.megatron.families import MegatronFamily
from lightning_megatron.checkpoint.formats.megatron.weight_map import kinds, norm_rules, of_vocabulary
from lightning_megatron.checkpoint.formats.weight_map import WeightRule, same
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.errors import ConfigError, Problem


def _config(fields: Mapping[str, Any], checkpoint: MegatronCheckpoint) -> BertConfig:
    arguments = checkpoint.arguments or {}
    is_fused = fields["activation"] == "gelu_tanh" and not arguments.get("openai_gelu")
    types = checkpoint.tensors.get("embedding.tokentype_embeddings.weight")
    return BertConfig(
        **fields,
        norm_position="before",
        # The kernel that fuses bias and GELU approximates it, and is one of layers only.
        head_activation="gelu" if is_fused else "",
        num_token_types=0 if types is None else types.shape[0],
        next_sentence="binary_head.weight" in checkpoint.tensors,
    )


def _rules(config: BertConfig) -> list[WeightRule]:
    if config.norms_after:
        reason = "Megatron's BERT has its norms before each sub-layer"
        raise ConfigError([Problem("norm_position", config.norm_position, reason, ("before",))])
    rules = norm_rules("head.encoder_norm", "decoder.final_layernorm", config)
    rules += norm_rules("head.norm", "lm_head.norm", config)
    pairs = {"head.transform": "lm_head.dense"}
    if config.next_sentence:
        pairs |= {"head.pooler": "pooler.dense", "head.next_sentence": "binary_head"}
    rules += [same(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in pairs.items() for kind in kinds(True)]
    if config.num_token_types:
        rules.append(same("embedding.token_type", "embedding.tokentype_embeddings.weight"))
    return [*rules, of_vocabulary("head.bias", "lm_head.bias", config)]


MEGATRON = MegatronFamily("lm_head.dense.weight", _config, _rules)

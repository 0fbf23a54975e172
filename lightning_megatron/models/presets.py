"""Named shapes, as data.

GPT-3 sizes: table 1 of https://arxiv.org/abs/2104.04473 (vocabulary 51,200, sequence 2048). LLaMA: the published model
cards' configurations. Mixtral: https://arxiv.org/abs/2401.04088 and the model cards; balance of load as Intel's recipe
for Gaudi. GPT-2: the published 124M configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_megatron.config.transformer import RopeScaling, TransformerConfig
from lightning_megatron.errors import Problem, nearest_names, raise_if_any


def _gpt(layers: int, hidden: int, heads: int, vocab: int, positions: int, **other: Any) -> TransformerConfig:
    return TransformerConfig(layers, hidden, heads, vocab, positions, **other)


def _llama(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> TransformerConfig:
    family: dict[str, Any] = {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rope",
        "add_bias_linear": False,
        "tie_embeddings": False,
    }
    return TransformerConfig(
        layers, hidden, heads, vocab, positions, ffn_hidden_size=ffn, num_query_groups=groups, **family | other
    )


def _llama3(layers: int, hidden: int, heads: int, groups: int, ffn: int, factor: float, **other: Any) -> Any:
    scaling = RopeScaling(factor=factor)
    return _llama(
        layers, hidden, heads, groups, ffn, 128256, 131072, rope_theta=500000.0, rope_scaling=scaling, **other
    )


def _mixtral(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, positions: int, **other: Any
) -> TransformerConfig:
    experts: dict[str, Any] = {"num_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.02}
    return _llama(layers, hidden, heads, groups, ffn, vocab, positions, **experts | other)


PRESETS: dict[str, TransformerConfig] = {
    "gpt-tiny": _gpt(8, 512, 8, 32000, 1024),
    "gpt2": _gpt(12, 768, 12, 50257, 1024, activation="gelu_tanh"),
    "gpt3-1.7b": _gpt(24, 2304, 24, 51200, 2048),
    "gpt3-3.6b": _gpt(30, 3072, 32, 51200, 2048),
    "gpt3-7.5b": _gpt(36, 4096, 32, 51200, 2048),
    "gpt3-18.4b": _gpt(40, 6144, 48, 51200, 2048),
    "gpt3-39.1b": _gpt(48, 8192, 64, 51200, 2048),
    "gpt3-76.1b": _gpt(60, 10240, 80, 51200, 2048),
    "gpt3-145.6b": _gpt(80, 12288, 96, 51200, 2048),
    "gpt3-310.1b": _gpt(96, 16384, 128, 51200, 2048),
    "llama-tiny": _llama(8, 512, 8, 4, 1408, 32000, 2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3.1-8b": _llama3(32, 4096, 32, 8, 14336, 8.0),
    "llama3.1-70b": _llama3(80, 8192, 64, 8, 28672, 8.0),
    "llama3.1-405b": _llama3(126, 16384, 128, 8, 53248, 8.0),
    "mixtral-tiny": _mixtral(4, 256, 8, 4, 512, 32000, 2048),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336, 32000, 32768, rope_theta=1e6),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384, 32768, 65536, rope_theta=1e6),
    "llama3.2-1b": _llama3(16, 2048, 32, 8, 8192, 32.0, tie_embeddings=True),
}


def preset(name: str) -> TransformerConfig:
    """The configuration of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest ones.
    """
    if name not in PRESETS:
        raise_if_any([Problem("config", name, "unknown preset", nearest_names(name, list(PRESETS)))])
    return PRESETS[name]


def configuration(given: str | TransformerConfig | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """A preset by name, a configuration, or one by its fields; with some of them changed.

    Raises:
        ConfigError: for an unknown name or field, or sizes that cannot work.
    """
    if isinstance(given, str):
        given = preset(given)
    elif not isinstance(given, TransformerConfig):
        given = TransformerConfig.of(given)
    return given.replace(**changes)

"""Every entry of every family's ``config.json``, changed: the logits change as transformers' do, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.families import FAMILIES
from tests.families import TINY, hf_files, hf_model, our_model, tokens_of

transformers = pytest.importorskip("transformers")

BOUND = 1e-5
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
ROPE: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    | {"original_max_position_embeddings": 8},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    _YARN,
    *(_YARN | {name: 2.0} for name in ("attention_factor", "beta_fast", "mscale")),
    _YARN | {"beta_slow": 0.5, "truncate": False, "mscale": 2.0, "mscale_all_dim": 0.5},
    _YARN | {"no such": 1},
]
OTHERS: dict[str, list[Any]] = {
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
    "rope_theta": [300.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8],
    "intermediate_size": [96, 5],
    "query_pre_attn_scalar": [22, 6],
    "hidden_activation": ["gelu", "relu", "silu"],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "swish"],
    "activation_function": ["gelu", "relu", "gelu_pytorch_tanh", "gelu_new", "silu"],
    "num_key_value_heads": [1, 2, 8],
    "n_inner": [20, None],
    "head_dim": [4, 8, None],
    "max_position_embeddings": [8, 64],
    "n_positions": [24, 64],
    "layer_types": [["sliding_attention"] * 4, ["full_attention"] * 4, ["full_attention", "sliding_attention"] * 2],
    "sliding_window": [3, None],
    "max_window_layers": [0, 2],
    "mlp_only_layers": [[], [0, 3], [0, 1, 2, 3]],
    "decoder_sparse_step": [2, 3],
    "dtype": ["bfloat16"],
    "linear_key_head_dim": [4, 12],  # the direction of a single feature is a sign, which rounding may turn
    "shared_expert_intermediate_size": [10, 0],
    "q_lora_rank": [10, None, 0],
    "kv_lora_rank": [20, 3],
    "qk_rope_head_dim": [2, 6, 5],
    "qk_nope_head_dim": [3, 12],
    "v_head_dim": [3, 12],
    "first_k_dense_replace": [0, 2, 4],
    "moe_layer_freq": [2],
    "n_routed_experts": [4, 16, 6],
    "n_shared_experts": [0, 1],
    "n_group": [1, 2, 8, 3],
    "topk_group": [1, 3, 4, 5],
    "num_experts_per_tok": [1, 2, 5],
    "topk_method": ["greedy", "noaux_tc", "group_limited_greedy", "none"],
    "scoring_func": ["softmax", "sigmoid"],
    "seq_aux": [False],
    "aux_loss_alpha": [0.5],
    "num_nextn_predict_layers": [1],
    "num_mtp_layers": [2],
    "qk_head_dim": [7],
    "ep_size": [2],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "summary_type": ["last"],
    "id2label": [{"0": "good", "1": "bad", "2": "neither"}],
    "label2id": [{"good": 0, "bad": 1, "neither": 2}],
}
"""Values to try; others follow from the type of what is there."""
TOGETHER: dict[str, list[dict[str, Any]]] = {
    family: [
        {"use_sliding_window": True, "sliding_window": 3},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ]
    for family in ("qwen2", "qwen3", "qwen3_moe")
}
TOGETHER["gemma3_text"] = [
    *({"rope_parameters": {kind: rule}} for kind in ("full_attention", "sliding_attention") for rule in ROPE[:5]),
    {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 300.0}}},
    {"rope_parameters": None, "rope_theta": 300.0},
    {"rope_parameters": None, "rope_local_base_freq": 300.0},
    {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    *({"layer_types": None, "sliding_window_pattern": every} for every in (1, 2, 6)),
]
TOGETHER["gemma2"] = [{"layer_types": None, "sliding_window": 3}, {"layer_types": ["full_attention"] * 3}]
TOGETHER["deepseek_v2"] = TOGETHER["deepseek_v3"] = [
    # Published files have entries that transformers does not know.
    *({"moe_layer_freq": each} for each in (1, 2)),
    *({"scoring_func": each} for each in ("softmax", "sigmoid")),
    *({"topk_method": each} for each in ("greedy", "noaux_tc")),
    *({"ep_size": each} for each in (1, 2)),
    *({"seq_aux": each, "aux_loss_alpha": 0.5} for each in (True, False)),
    {"q_lora_rank": None, "attention_bias": True},
    {"q_lora_rank": 12, "attention_bias": True},
    {"n_group": 1, "topk_group": 1},
    {"n_group": None, "topk_group": None},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_key_value_heads": None},
    {"n_routed_experts": 12, "n_group": 3, "topk_group": 1},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
]
TOGETHER["glm4_moe"] = [
    *({"partial_rotary_factor": each} for each in (0.25, 0.3, 0.75, 0.4, 0.2, 0.0, 1.5, None)),
    *({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": each}} for each in (0.25, 1.0, 0.4)),
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.75},
    {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}, "partial_rotary_factor": 0.75},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
    {"head_dim": 12, "partial_rotary_factor": 0.67},
    {"n_group": 1, "topk_group": 1},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"use_qk_norm": False, "attention_bias": False},
]
"""Entries that mean something together only."""
TOGETHER["qwen3_next"] = [
    *({"layer_types": [kind] * 4} for kind in ("linear_attention", "full_attention")),
    {"layer_types": ["full_attention", "linear_attention"] * 2},
    *({"layer_types": None, "full_attention_interval": every} for every in (1, 2, 5)),
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {"rope_scaling": _YARN, "partial_rotary_factor": 0.5},
    {"attention_bias": True, "partial_rotary_factor": 1.0},
    {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    {"norm_topk_prob": False, "num_experts_per_tok": 1},
]
_NOT_SAVED = {"num_nextn_predict_layers", "num_mtp_layers"}
"""Entries that say of tensors which transformers leaves out of its files."""


def values_for(name: str, value: Any) -> list[Any]:
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, 1]
    if isinstance(value, float):
        return [value * 2 + 0.25]
    if isinstance(value, str):
        return [f"{value}x"]
    return [1] if value is None else []


def mutations(family: str) -> list[dict[str, Any]]:
    """Changed entries: all that transformers knows, spellings that it still reads, and one that is unknown."""
    known = transformers.AutoConfig.for_model(**TINY[family]).to_dict() | TINY[family]
    names = [name for name in known if name not in ("model_type", "transformers_version")]
    names += [
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "no_such_entry",
    ]
    alone = [{name: value} for name in dict.fromkeys(names) for value in values_for(name, known.get(name))]
    return alone + TOGETHER.get(family, [])


def logits_of_theirs(config: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """transformers' logits and files; ``None`` if it cannot have such a model."""
    try:
        model = hf_model(config).float()
        with torch.no_grad():
            return model(tokens_of(2, 20)).logits, hf_files(model)
    except Exception:  # whatever it raises
        return None


def fault(family: str, change: dict[str, Any], seen: dict[str, int]) -> str | None:
    config = TINY[family] | change
    try:
        FAMILIES[family].config_of(config)
    except ConfigError as refusal:
        named = any(name in str(refusal) for name in change)
        seen["refused" if named else "impossible"] += 1
        wrong = not named and logits_of_theirs(config) is not None
        return f"{change} is refused without its name: {refusal}" if wrong else None
    theirs = logits_of_theirs(config)
    if theirs is None:
        seen["impossible"] += 1
        return None
    try:
        model = our_model(config, theirs[1])
    except ConfigError as refusal:
        seen["refused"] += 1
        is_told = change.keys() <= _NOT_SAVED and "model.layers.4." in str(refusal) and "missing" in str(refusal)
        return None if is_told else f"{change}: {refusal}"
    with torch.no_grad():
        ours = model(tokens_of(2, 20))
    seen["equal"] += 1
    if ours.shape == theirs[0].shape:
        found = float((ours - theirs[0]).abs().max() / theirs[0].abs().max())
        # In bf16 Gemma's scale of the embeddings is rounded, too.
        bound = 2**-8 if "dtype" in change else BOUND
        return None if found < bound else f"{change} is ignored, or means something else: off by {found:.1e}"
    return f"{change}: {tuple(ours.shape)} is not {tuple(theirs[0].shape)}"


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "qwen3" else pytest.mark.slow) for each in TINY]
)
def test_no_entry_is_ignored(family: str) -> None:
    seen = {"equal": 0, "refused": 0, "impossible": 0}
    found = [fault(family, change, seen) for change in mutations(family)]
    print(family, seen)
    assert [each for each in found if each] == []
    assert seen["equal"] > 20

"""Tiny random models of every family, by transformers and by us: a line here has a family tested in every way."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import FAMILIES
from lightning_megatron.lightning.pretrained.parameter_specs import weight_shapes
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.params import ShardRanks, named_weights
from tests.foreign import to_native, weight_map
from tests.whole_weights import load_full

VOCABULARY, POSITIONS = 61, 32
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = _SIZES | {"head_dim": 6, "query_pre_attn_scalar": 11, "sliding_window": 5, "layer_types": _LAYERS}
_GEMMA["pad_token_id"] = None  # else the padding's row of the embedding has no gradient
_TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
_LATENTS = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
_DEEPSEEK = _SIZES | _LATENTS | {"num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 8}
_DEEPSEEK |= {"n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4}
_DEEPSEEK |= {"topk_group": 2, "routed_scaling_factor": 1.5}
_DEEPSEEK["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_DEEPSEEK["rope_parameters"] |= {"mscale": 0.7, "mscale_all_dim": 0.9, "rope_theta": 700.0}
_GLM: dict[str, Any] = {"head_dim": 8, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1}
_GLM |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2}
_GLM |= {"routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0}
# A norm of a value head's few features divides by small numbers; a larger epsilon keeps it from magnifying rounding.
_DELTA = {
    "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": POSITIONS}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 8, "initializer_range": 0.1},
    "llama": _SIZES,
    "mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _SIZES | {"tie_word_embeddings": True},
    "qwen3": _SIZES | {"head_dim": 6},
    "qwen3_moe": _SIZES | _EXPERTS | {"head_dim": 6, "mlp_only_layers": [1]},
    "qwen3_next": _SIZES
    | _EXPERTS
    | _DELTA
    | {"head_dim": 8, "mlp_only_layers": [1], "shared_expert_intermediate_size": 20},
    "mistral": _SIZES | {"sliding_window": 5},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    "gemma3_text": _GEMMA | {"rope_parameters": _TWO_ROPES},
    "gpt_oss": _SIZES
    | {"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    | {"sliding_window": 5, "layer_types": _LAYERS, "swiglu_limit": 0.3},
    "deepseek_v2": _DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK | {"norm_topk_prob": True, "num_nextn_predict_layers": 0},
    "glm4_moe": _SIZES | _GLM,
}
"""Contents of ``config.json`` by ``model_type``."""
for _kind, _config in TINY.items():
    TINY[_kind] = {"model_type": _kind, "bos_token_id": None, "eos_token_id": None} | _config


TRAINED: dict[str, dict[str, Any]] = {
    family: {"mtp_num_layers": 1, "moe_expert_bias_update_rate": 0.001, "mtp_loss_scaling_factor": 0.3}
    for family in ("deepseek_v3", "glm4_moe")
}
"""Fields that matter in training, and that no ``config.json`` has."""
RECURRENT = {"qwen3_next"}
"""Families with a state that passes through whole sequences: context parallelism and packed documents are refused."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp4 without ZeRO": {"dp": 4, "distributed_optimizer": False},
    "tp2": {"tp": 2},
    "tp2, no sp": {"tp": 2, "sequence_parallel": False},
    "tp4": {"tp": 4},
    "tp4, no sp": {"tp": 4, "sequence_parallel": False},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "tp2 dp2, no sp, no ZeRO": {"tp": 2, "dp": 2, "sequence_parallel": False, "distributed_optimizer": False},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2 vpp2": {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved"},
    "pp2, zero-bubble": {"pp": 2, "pipeline_schedule": "zero-bubble"},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "pp2 vpp2 tp2": {"pp": 2, "vpp": 2, "tp": 2, "pipeline_schedule": "interleaved"},
    "cp2": {"cp": 2},
    "cp2, all_gather": {"cp": 2, "cp_comm_type": "all_gather"},
    "cp2, a2a": {"cp": 2, "cp_comm_type": "a2a"},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
    "cp2 pp2": {"cp": 2, "pp": 2},
    "tp2, recompute full": {"tp": 2, "recompute": "full"},
    "tp2, recompute selective": {"tp": 2, "recompute": "selective"},
    "dp2, recompute attention": {"dp": 2, "recompute": ["attention"]},
    "pp2 tp2, recompute full": {"pp": 2, "tp": 2, "recompute": "full"},
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {"dp": 2, "ep": 2},
    "dp4 ep4": {"dp": 4, "ep": 4},
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "etp": 1},
    "tp2 etp1": {"tp": 2, "etp": 1},
    "dp4 ep2": {"dp": 4, "ep": 2},
    "pp2 dp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2},
    "dp2 ep2, recompute moe": {"dp": 2, "ep": 2, "recompute": "moe"},
}


def size_of(layout: dict[str, Any]) -> int:
    """Ranks of a layout."""
    return prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))


def hf_model(config: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model; biases and norms are random too, or a swap of two would not show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**deepcopy(config)), attn_implementation="eager"
    ).eval()
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name), std=0.15)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # a weight, which no gradient changes
            torch.nn.init.normal_(buffer, std=0.15)
    return model


def hf_files(model: Any) -> dict[str, Tensor]:
    """Tensors under the names of files, which are not always those in memory (experts)."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def our_config(config: dict[str, Any], **changes: Any) -> TransformerConfig:
    """Our configuration of a ``config.json``; the losses of experts are off, which transformers leaves out, too."""
    usual: dict[str, Any] = {"vocab_multiple": 4, "moe_load_balancing": "none"}
    family = FAMILIES[config["model_type"]]
    return family.config_class(**family.config_from_hf(config) | usual | changes)


def our_tensors(config: dict[str, Any], files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of files by our names."""
    shape = our_config(config)
    rules = weight_map(FAMILIES[config["model_type"]], shape)
    return to_native(rules, files, weight_shapes(shape))


def our_model(config: dict[str, Any], files: dict[str, Tensor]) -> GPTModel:
    """Our model with the weights of files."""
    model = GPTModel(our_config(config)).eval()
    load_full(model, our_tensors(config, files), ShardRanks())
    return model


def random_model(config: TransformerConfig) -> GPTModel:
    """Our model with all weights at random, norms and the biases of experts too."""
    torch.manual_seed(0)
    model = GPTModel(config)
    with torch.no_grad():
        for name, weight, _ in named_weights(model):
            weight.normal_(float("norm" in name), 0.15)
    return model


def whole_weights(model: GPTModel) -> dict[str, Tensor]:
    """Weights of a model in one piece, without the padding of the vocabulary."""
    return {name: weight.detach()[: spec.global_shape[0]] for name, weight, spec in named_weights(model)}


def tokens_of(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random tokens ``[B, S]``."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def layouts_of(family: str) -> list[str]:
    """Names of the layouts that a family has."""
    if not our_config(TINY[family]).num_experts:
        return [*LAYOUTS]
    # With experts and tp each rank must hold tokens of its own.
    found = {name: each for name, each in (LAYOUTS | WITH_EXPERTS).items() if each.get("sequence_parallel", True)}
    return [name for name, layout in found.items() if "cp" not in layout or family not in RECURRENT]

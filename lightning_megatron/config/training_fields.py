"""Fields of a configuration that decide how a model is trained or laid out, and not what its weights compute."""

from __future__ import annotations

from lightning_megatron.config.moe import MoEConfig

_OF_TRAINING = {
    "init_std",
    "hidden_dropout",
    "attention_dropout",
    "label_smoothing",
    "mtp_loss_scaling_factor",
    "vocab_multiple",
    "moe_load_balancing",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_input_jitter_eps",
    "moe_expert_bias_update_rate",
    "moe_token_dispatcher",
    "moe_token_drop_policy",
    "moe_pad_to_capacity",
    "moe_dynamic",
}


def is_of_training(name: str, config: MoEConfig) -> bool:
    """True for a field of training, such as expert capacities; in a model without experts, for every ``moe_`` field."""
    of_experts = ("moe_capacity",) if config.num_experts else ("moe_",)
    return name in _OF_TRAINING or name.startswith(of_experts)

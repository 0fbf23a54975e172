"""Time of an optimizer step (norm, update of a rank's shard, new parameters), and of moving a step's data."""

from __future__ import annotations

from functools import lru_cache

from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.time.compute import Work
from lightning_megatron.tools.planning.time.sizes import Sizes

HOST_BANDWIDTH = 5e9
"""Bytes a second from a sample in the host's memory to the device; token ids are few."""


def dense_parameters(sizes: Sizes, stage: StageLayers) -> float:
    """Parameters of a stage that all data-parallel ranks share, on one rank."""
    config = sizes.config
    norm = config.hidden_size * (1 if config.norm == "rmsnorm" else 2)
    small = 2.0 * norm + config.q_lora_rank + config.kv_lora_rank
    if config.add_bias_linear:  # those of column-parallel layers are cut, those of row-parallel ones are not
        small += 2 * config.hidden_size + sizes.gates * config.ffn_hidden_size / sizes.layout.tp
        small += int(sizes.head_features + 2 * sizes.group_features)
    layers, further = sizes.layers_of(stage), config.mtp_num_layers * stage.has_loss
    with_experts = expert_layers(sizes, stage)
    total = len(layers) * small + (len(layers) - with_experts) * sizes.dense_weights(False)
    total += with_experts * sizes.dense_weights(True) if with_experts else 0.0
    total += further * (2 * config.hidden_size**2 + 3 * norm)
    if stage.has_embedding and config.position_embedding == "learned":
        total += config.max_position_embeddings * config.hidden_size
    total += norm * (stage.has_loss + (stage.has_embedding and config.embedding_norm))
    table = sizes.vocab_rows * config.hidden_size
    whole = stage.has_embedding and stage.has_loss and config.tie_embeddings
    copy = further > 0 and not stage.has_embedding and not config.tie_embeddings
    return total + table * ((stage.has_embedding + stage.has_loss) - whole + copy)


def expert_parameters(sizes: Sizes, stage: StageLayers) -> float:
    """Parameters of a stage's experts on one rank."""
    return sizes.expert_weights * expert_layers(sizes, stage)


def expert_layers(sizes: Sizes, stage: StageLayers) -> int:
    """Layers of a stage that have experts."""
    config = sizes.config
    if not config.num_experts:
        return 0
    layers = sizes.layers_of(stage)
    return _among(config.moe_layers, layers) if config.moe_layers else len(layers)


@lru_cache(maxsize=4096)
def _among(chosen: tuple[int, ...], layers: tuple[int, ...]) -> int:
    """Number of layers that are among the chosen ones."""
    known = set(chosen)
    return sum(layer in known for layer in layers)


def bytes_of_update(sizes: Sizes) -> float:
    """Bytes read and written for one parameter of a rank's shard.

    The norm reads the gradient; the update reads gradient, main parameter and states, writes main parameter and states,
    and then the parameter in the model's format.
    """
    states = sizes.job.optimizer_states
    main = 4 if sizes.job.precision in ("bf16-mixed", "16-mixed", "32-true") else sizes.value_bytes
    copy = sizes.value_bytes if main != sizes.value_bytes else 0
    return 2 * sizes.grad_bytes + 2 * main * (1 + states) + copy


def optimizer_seconds(sizes: Sizes, device: DeviceSpec, dense: float, experts: float) -> float:
    """Seconds of the optimizer step.

    Args:
        sizes: sizes of the rank.
        dense: parameters of the rank that all data-parallel ranks share.
        experts: parameters of its experts.
    """
    layout = sizes.layout
    if sizes.job.distributed_optimizer:
        dense /= layout.data_parallel_size * layout.cp
        experts /= layout.expert_data_parallel_size
    return Work(bytes=(dense + experts) * bytes_of_update(sizes), kernels=20).seconds(device, sizes)


def data_seconds(sizes: Sizes) -> float:
    """Seconds to copy a step's tokens and labels, 8 bytes each, to the device; reading them overlaps with the step."""
    return sizes.job.num_micro_batches * sizes.tokens * 16 / HOST_BANDWIDTH

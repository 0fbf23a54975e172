"""Time of an optimizer step (norm, update of a rank's shard, new parameters), and of moving a step's data."""

from __future__ import annotations

from functools import lru_cache

from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.time.compute import Work
from lightning_megatron.tools.planning.time.sizes import Sizes

HOST_BANDWIDTH = 5e9
"""Bytes a second from a sample in the host's memory to the device; token ids are few."""


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

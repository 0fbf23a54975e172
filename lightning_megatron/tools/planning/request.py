"""Input of a search: a model, devices and batches, and the arguments that the user has fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.arguments import OneOf, Rules, at_least, field_problems
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, multiples_around, nearest_names, raise_if_any
from lightning_megatron.tools.planning.core.device_file import DeviceSpec
from lightning_megatron.tools.planning.core.job import PRECISIONS, AttentionKind

FIXABLE = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size", "recompute", "cp_comm_type", "pipeline_schedule")
"""Arguments of the strategy that a user can fix."""

RULES: Rules = {
    "num_devices": at_least(1),
    "seq_length": at_least(1),
    "global_batch_size": at_least(1),
    "precision": OneOf(PRECISIONS),
    "max_memory": at_least(1),
}


@dataclass(frozen=True)
class PlanRequest:
    """A model, the devices to train it on, and the samples of a step.

    Attributes:
        config: shape of the model.
        device: kind of the devices.
        num_devices: devices of the job.
        seq_length: tokens of a sample.
        global_batch_size: samples of one optimizer step, over all replicas.
        precision: precision by Lightning's name.
        fp8: True if linear layers multiply in fp8.
        attention: implementation of attention: ``"flash"`` keeps no scores, ``"reference"`` keeps them.
        max_memory: bytes that tensors of a rank may take; ``None`` for the device's usable memory.
        fixed: arguments of the strategy that the search does not vary, with names of ``FIXABLE``.

    Raises:
        ConfigError: with every invalid value.
    """

    config: TransformerConfig
    device: DeviceSpec
    num_devices: int
    seq_length: int
    global_batch_size: int
    precision: str = "bf16-mixed"
    fp8: bool = False
    attention: AttentionKind = "flash"
    max_memory: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_if_any(field_problems(self, RULES, leave=("config", "device", "fixed")) or self._problems())

    def _problems(self) -> list[Problem]:
        found = [
            Problem(name, value, "no argument that a search can keep", nearest_names(name, FIXABLE))
            for name, value in self.fixed.items()
            if name not in FIXABLE
        ]
        node, longest = self.device.devices_per_node, self.config.max_position_embeddings
        if self.num_devices > node and self.num_devices % node:
            reason = f"a job takes whole nodes, of {node} devices each"
            found.append(Problem("devices", self.num_devices, reason, multiples_around(self.num_devices, node)))
        if self.seq_length > longest:
            reason = f"longer than the model's max_position_embeddings={longest}"
            found.append(Problem("seq_length", self.seq_length, reason, (longest,)))
        return found

    @property
    def limit(self) -> int:
        """Bytes that tensors of a rank may take."""
        return self.device.usable_bytes if self.max_memory is None else self.max_memory

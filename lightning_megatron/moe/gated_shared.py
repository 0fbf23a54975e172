"""Experts with a shared expert that has a gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.whole_linear import WholeLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.layer import MoELayer


class GatedMLP(MLP):
    """A feed-forward layer with a gate of each token on its output.

    Args:
        mlp: the layer without a gate; this one takes over its parts.
        gate: layer that gives the logit of the gate.
    """

    def __init__(self, mlp: MLP, gate: WholeLinear) -> None:
        nn.Module.__init__(self)
        self.fc1, self.activation, self.fc2, self.gate = mlp.fc1, mlp.activation, mlp.fc2, gate

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, H] -> [S, B, H]``."""
        return self.gate(x).sigmoid() * super().forward(x)


class GatedSharedMoE(MoELayer):
    """Router and experts, with a gate of each token on the shared expert; arguments as of :class:`MoELayer`."""

    def __init__(self, config: TransformerConfig, mesh: ParallelMesh, *, sequence_parallel: bool, **how: Any) -> None:
        super().__init__(config, mesh, sequence_parallel=sequence_parallel, **how)
        assert self.shared is not None, "a gate needs a shared expert"
        alike: dict[str, Any] = {"sequence_parallel": sequence_parallel, "init_std": config.init_std, "bias": False}
        self.shared = GatedMLP(self.shared, WholeLinear(config.hidden_size, 1, mesh, **alike))

"""Feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.parts import FeedForward
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.activation import Activation, activation_of
from lightning_megatron.ops.registry import ANY_DEVICE, Ops


class MLP(nn.Module):
    """``fc2(activation(fc1(x)))``; a gated activation has gate and up side by side in ``fc1``.

    Args:
        hidden_size: features ``H``.
        ffn_hidden_size: features ``F`` between the two layers.
        bias: True if the two layers have biases.
        sequence_parallel: True if input and output are sequence shards.
        init_std: standard deviation of ``fc1``'s initial weight.
        output_init_std: standard deviation of ``fc2``'s initial weight.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        mesh: ParallelMesh,
        *,
        activation: Activation,
        bias: bool,
        sequence_parallel: bool,
        init_std: float,
        output_init_std: float,
    ) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(
            hidden_size,
            activation.parts * ffn_hidden_size,
            mesh,
            bias=bias,
            blocks=activation.parts,
            sequence_parallel=sequence_parallel,
            init_std=init_std,
        )
        self.activation = activation.run
        self.fc2 = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            mesh,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init_std=output_init_std,
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, H] -> [S, B, H]``."""
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class DenseFeedForward(FeedForward, MLP):
    """The feed-forward part of a layer without experts; arguments as of every part."""

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        MLP.__init__(
            self,
            config.hidden_size,
            config.ffn_hidden_size,
            mesh,
            activation=activation_of(config),
            bias=config.add_bias_linear,
            sequence_parallel=sequence_parallel,
            init_std=config.init_stds.fc1,
            output_init_std=config.init_stds.fc2,
        )
        self.is_pure = mesh.tp.size == 1

    def forward(self, x: Tensor, routed: object = None) -> Tensor:
        """``[S, B, H] -> [S, B, H]``; every token is transformed alike, ``routed`` or not."""
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out

"""Dropout of the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.dropout import dropout


class Dropout(nn.Module):
    """Dropout that draws the same mask on all tensor-parallel ranks, or a different one where they hold shards.

    Args:
        p: probability of zeroing an element.
        mesh: whose random streams are drawn from.
        sequence_parallel: the input is a sequence shard, so that masks must differ.
    """

    def __init__(self, p: float, mesh: ParallelMesh, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.p, self.rng = p, mesh.rng
        self.sharded = sequence_parallel and mesh.tp.size > 1

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the identity in evaluation."""
        if not self.p or not self.training:
            return x
        if not self.sharded:
            return dropout(x, self.p)
        with self.rng.tensor_parallel():
            return dropout(x, self.p)

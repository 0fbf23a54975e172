"""Dropout of the residual stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.dropout import dropout


class Dropout(nn.Module):
    """Dropout with the same mask on ranks that hold the same tokens, and different masks on the others.

    Args:
        p: probability of zeroing an element.
        mesh: mesh whose random streams are used.
        sequence_parallel: True if the input is a sequence shard; masks then differ over tp. Over cp they always differ.
    """

    def __init__(self, p: float, mesh: ParallelMesh, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.p, self.rng = p, mesh.rng
        self.over_tp = sequence_parallel and mesh.tp.size > 1
        self.over_cp = mesh.cp.size > 1

    def forward(self, x: Tensor) -> Tensor:
        """``[...] -> [...]``; the identity in evaluation."""
        if not self.p or not self.training:
            return x
        with self._stream():
            return dropout(x, self.p)

    def _stream(self) -> AbstractContextManager[None]:
        if self.over_tp:
            return self.rng.tensor_parallel()
        return self.rng.context_parallel() if self.over_cp else nullcontext()

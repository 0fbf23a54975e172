"""What a forward leaves in memory, by the allocator's own account."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.pipeline.boundary import StageBoundary, StageReached
from lightning_megatron.pipeline.partition import StageLayers
from lightning_megatron.recompute import RecomputePlan

T = TypeVar("T")


def left_allocated(function: Callable[[], T]) -> tuple[T, int]:
    """What a function returns, and the bytes on the CPU that it has allocated and not freed.

    Nothing escapes: not what an autograd function keeps on its own account, nor what is kept through hooks.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as ran:
        result = function()
    return result, sum(event.self_cpu_memory_usage for event in ran.key_averages())


class MiddleStage:
    """Layers of a decoder and nothing else: a pipeline stage that has neither embedding nor loss.

    Args:
        config: shape of the whole model; all its layers are on this stage.
        mesh: the ranks.
        recompute: what is computed again.

    Attributes:
        model: the layers, in the dtype that is torch's default now.
    """

    def __init__(self, config: TransformerConfig, mesh: ParallelMesh, recompute: RecomputePlan) -> None:
        self._boundary = StageBoundary(3)
        part = StageLayers(1, 0, 0, range(config.num_layers), has_embedding=False, has_loss=False)
        self.model = GPTModel(config, mesh, [part], self._boundary, recompute)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[S, B, H] -> [S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism)."""
        length = hidden.shape[0] * (self.model.axis.size if self.model.sequence_parallel else 1)
        tokens = torch.zeros(hidden.shape[1], length, dtype=torch.int64)  # only their number counts here
        try:
            with self._boundary.at(1, hidden):
                self.model(tokens)
        except StageReached as reached:
            return reached.hidden.requires_grad_()
        raise AssertionError("a middle stage ends at its boundary")

    def kept_bytes(self, length: int, batch: int) -> int:
        """What the layers keep for their backward, their common input included, what they return not.

        Args:
            length: tokens of a whole sequence ``S``.
            batch: sequences ``B``.
        """
        shape = self.model.hidden_shape(torch.zeros(batch, length))
        dtype = next(self.model.parameters()).dtype
        hidden = torch.randn(shape, dtype=dtype, requires_grad=True)
        out, left = left_allocated(lambda: self(hidden))
        return left - out.untyped_storage().nbytes() + hidden.untyped_storage().nbytes()

"""Measurement of the activations that a forward leaves in memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Where torch's own documentation of modes ("Extending PyTorch") has it.
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.stage import StageBoundary, StageLayers, StageReached

# A backend's own threads may hold sent tensors for a moment longer.
_READINGS = 10


class LiveStorages(TorchDispatchMode):
    """Mode that tracks the memory of every tensor that an operation returns, on any device.

    It sees all tensors: those that autograd functions keep themselves as well as those that are saved through hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)
        return out

    def nbytes(self, *, but: Iterable[Tensor] = ()) -> int:
        """Bytes of all live storages, except those of the tensors in ``but``."""
        alive = [storage for ref in self._seen.values() if (storage := ref()) is not None]
        left_out = {tensor.untyped_storage().data_ptr() for tensor in but}
        return sum(storage.nbytes() for storage in alive if storage.data_ptr() not in left_out)


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, list | tuple):
        for item in out:
            yield from _tensors(item)


class MiddleStage:
    """Pipeline stage with decoder layers only, without embedding and loss.

    Args:
        config: shape of the whole model; all its layers are on this stage.
        mesh: mesh of this rank.
        recompute: plan of recomputation.

    Attributes:
        model: layers, in torch's default dtype.
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
            return reached.hidden
        raise AssertionError("a middle stage ends at its boundary")

    def kept_bytes(self, length: int, batch: int) -> int:
        """Bytes that the layers keep for their backward, with their common input and without their output.

        Args:
            length: tokens of a whole sequence ``S``.
            batch: sequences ``B``.
        """
        shape = self.model.hidden_shape(torch.zeros(batch, length))
        dtype = next(self.model.parameters()).dtype
        leaf = torch.randn(shape, dtype=dtype, requires_grad=True)
        with LiveStorages() as live:
            out = self(leaf * 1)  # a leaf itself would be kept in any case
        known = [out, leaf, *self.model.parameters()]
        kept = live.nbytes(but=known)
        for _ in range(_READINGS if self.model.axis.size > 1 else 0):
            time.sleep(0.05)
            kept = min(kept, live.nbytes(but=known))
        return kept

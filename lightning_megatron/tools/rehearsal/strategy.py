"""The strategy of a rehearsal: the real one, on a rank whose peers do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.lightning.environments.given_ranks import GivenRanks
from lightning_megatron.lightning.step.watchers import watches_parameters
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.pipeline.tied_embeddings import StageParameters

_BLOCK = 1 << 22
"""Elements of a gradient that are added at a time. With a CPU's 2^18, half of all operations would be these sums."""


class OneOfMany(GivenRanks):
    """Environment of one rank of a job whose other ranks do not exist.

    Args:
        rank: global rank.
        world_size: number of ranks.
        ranks_of_node: number of ranks of a node.
    """

    def __init__(self, rank: int, world_size: int, ranks_of_node: int) -> None:
        super().__init__()
        self._rank, self._world_size, self._ranks_of_node = rank, world_size, ranks_of_node

    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def global_rank(self) -> int:
        """Rank of the job."""
        return self._rank

    def local_rank(self) -> int:
        """Rank on the node."""
        return self._rank % self._ranks_of_node

    def node_rank(self) -> int:
        """Number of the node."""
        return self._rank // self._ranks_of_node


class OneRank(JobRanks):
    """One rank of a job whose other ranks do not exist, and are assumed to have equal arguments.

    Attributes:
        on_mesh: function called with the mesh once it is created.
        stages: parameters of every pipeline rank; empty without a pipeline.
    """

    on_mesh: Callable[[ParallelMesh], None]
    stages: Sequence[StageParameters]

    def take_device(self) -> None:
        """Set the rank without acquiring a device."""
        self.tell_rank()

    def meet(self) -> None:
        """Skip the rendezvous: there are no other ranks."""

    def create_mesh(self) -> ParallelMesh:
        """The mesh of a rank among others that do not exist: its host is the only one."""
        mesh = super().create_mesh()
        mesh.host = replace(mesh.host, size=1, rank=0, ranks=(mesh.rank,))
        mesh.weight_grads.block = _BLOCK
        self.on_mesh(mesh)
        return mesh

    def register_end(self) -> None:
        """Register nothing: no other process waits for this one at its exit."""

    def gather_stages(self) -> list[StageParameters]:
        """Parameters of every pipeline rank, without asking the others."""
        return list(self.stages) or super().gather_stages()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object."""
        return obj


class RehearsedStrategy(MegatronStrategy):
    """The strategy without the parts that only compare arguments and inputs with other ranks.

    Model, buffers, optimizer, schedule and steps are the real ones.

    Args:
        on_mesh: function called with the mesh once it is made.
        stages: parameters of every pipeline rank; empty without a pipeline.
        **arguments: arguments of the strategy.
    """

    _kind_of_ranks = OneRank
    _ranks: OneRank

    def __init__(
        self, on_mesh: Callable[[ParallelMesh], None], stages: Sequence[StageParameters], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._ranks.on_mesh, self._ranks.stages = on_mesh, stages

    def model_to_device(self) -> None:
        """Do nothing: the model is on its device, and torch cannot move fake parameters referenced elsewhere."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Put the model on flat buffers; the first steps do not compare gradients with those of other ranks."""
        super().setup_optimizers(trainer)
        assert self._params.optimizers is not None
        checks, watched = self._params.optimizers.finite_checks, watches_parameters(trainer)
        self.precision_plugin.manage(self.sharded_optimizers, None, watched, checks)

"""The strategy of a rehearsal: the real one, for a rank whose fellows do not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.lightning.environments.given_ranks import GivenRanks
from lightning_megatron.lightning.step.watchers import watches_parameters
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.mesh import ParallelMesh, RehearsedRanks

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


class RehearsedStrategy(MegatronStrategy):
    """The strategy with the parts left out that only talk to other ranks about what they were given.

    Model, buffers, optimizer, schedule and steps are the real ones.

    Args:
        on_mesh: function called with the mesh once it is made.
        **arguments: arguments of the strategy.

    Attributes:
        others: other ranks, as far as this one depends on them.
    """

    def __init__(self, on_mesh: Callable[[ParallelMesh], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._on_mesh = on_mesh
        self.others = RehearsedRanks()

    @property
    def job(self) -> JobSettings:
        """Settings of the job."""
        return self._job

    def _take_device(self) -> None:
        self.set_world_ranks()

    def _meet(self) -> Store | None:
        return None

    def _compare_ranks(self, trainer: Trainer | None, *objects: object) -> None:
        self._take_device()

    def _create_mesh(self) -> ParallelMesh:
        mesh = super()._create_mesh()
        mesh.rehearsed = self.others
        mesh.weight_grads.block = _BLOCK
        self._on_mesh(mesh)
        return mesh

    def model_to_device(self) -> None:
        """Leave the model: it is there already, and torch moves no fake parameters to which others refer."""

    def _register_end(self) -> None:
        """No process of others waits."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object: all ranks are given the same."""
        return obj

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Put the model on flat buffers; the first steps do not compare gradients with those of other ranks."""
        super().setup_optimizers(trainer)
        assert self._optimizer_set is not None
        checks, watched = self._optimizer_set.finite_checks, watches_parameters(trainer)
        self.precision_plugin.manage(self.sharded_optimizers, None, watched, checks)

"""Comparison of what ranks were given, at each start and before anything waits for another rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer

from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.lightning.comparison.compare import RankComparison
from lightning_megatron.lightning.comparison.facts import Statement, loader_statement, optimizer_statement
from lightning_megatron.lightning.comparison.places import PlaceProbe, places_of
from lightning_megatron.lightning.strategy.mesh import MeshStrategy
from lightning_megatron.lightning.streams.evaluation import may_stay_away
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind

_AFTER_RESTORING = ("_CheckpointConnector.resume_end", "run-stage")
"""Lightning's names of barriers."""


class StartComparison:
    """Ranks that were given different settings, models, data or code are named before the first step.

    Every method raises a ``ConfigError`` on all ranks, with every difference.

    Args:
        strategy: strategy of this rank.
        may_differ: names of facts that are left out.
    """

    def __init__(self, strategy: MeshStrategy, may_differ: Sequence[str]) -> None:
        self._strategy, self._may_differ = strategy, may_differ
        self._comparison: RankComparison | None = None
        self._knows_restoring = False

    @property
    def has_begun(self) -> bool:
        """True if the ranks of this run have been compared."""
        return self._comparison is not None

    def begin(self, store: Store, statement: Statement, trainer: Trainer | None, objects: Sequence[object]) -> None:
        """Compare what is given before ranks talk: the layout, too, and so over the store alone; then the folders.

        Args:
            store: store where all ranks meet.
            statement: facts of this rank.
            trainer: the Trainer.
            objects: objects that it was handed.
        """
        ranks = self._strategy.global_rank, self._strategy.world_size
        self._knows_restoring, self._comparison = False, RankComparison(store, *ranks, self._may_differ)
        self._compare(statement)
        PlaceProbe(store, *ranks, self._may_differ).compare(places_of(trainer, objects))

    def restart(self) -> None:
        """Let the next run compare again."""
        self._comparison = None

    def optimizers(self, module: LightningModule | None) -> None:
        """Compare optimizers that the user has configured, and the model, which has been built by now."""
        if self._comparison is not None and module is not None:
            given, stage = self._strategy, self._strategy.mesh.pp.rank
            self._compare(optimizer_statement(module, given.optimizers, given.lr_scheduler_configs, stage))

    def loader(self, dataloader: object, trainer: Trainer) -> None:
        """Compare what a loader says of itself, before Lightning asks all ranks for its length."""
        stage = None if trainer.state.stage is None else trainer.state.stage.dataloader_prefix
        mesh, given = self._strategy.mesh, stage or "val"
        may_be_empty = may_stay_away(trainer, mesh.layout)
        self._compare(loader_statement(dataloader, given, mesh.dp.rank, may_be_empty=may_be_empty))

    def restoring(self) -> None:
        """Compare that this rank loads a checkpoint."""
        self._compare_restoring(True)

    def barrier(self, name: str | None) -> None:
        """Compare, at the first barrier after restoring, that this rank has loaded nothing."""
        if name in _AFTER_RESTORING:
            self._compare_restoring(False)

    def _compare_restoring(self, restores: bool) -> None:
        if self._comparison is not None and not self._knows_restoring:
            self._knows_restoring = True
            self._compare(Statement({"trainer.ckpt_path": "a checkpoint" if restores else None}))

    def _compare(self, statement: Statement) -> None:
        if self._comparison is not None:
            Call(self._strategy.recorder.main, Kind.RENDEZVOUS, "world", 0).run(self._comparison.compare, statement)

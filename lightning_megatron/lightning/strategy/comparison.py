"""A strategy whose ranks compare what they were given, at each start and before anything waits for another rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from lightning_megatron.lightning.comparison.compare import RankComparison
from lightning_megatron.lightning.comparison.facts import (
    Statement,
    loader_statement,
    optimizer_statement,
    start_statement,
)
from lightning_megatron.lightning.strategy.checkpoints import CheckpointStrategy
from lightning_megatron.lightning.streams.evaluation import may_stay_away
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind

_AFTER_RESTORING = ("_CheckpointConnector.resume_end", "run-stage")
"""Lightning's names of barriers."""


class ComparedStrategy(CheckpointStrategy):
    """Ranks that were given different settings, models, data or code are named before the first step.

    Attributes:
        settings: arguments of the strategy, as given.
    """

    settings: Mapping[str, Any] = {}

    _may_differ: Sequence[str] = ()
    _comparison: RankComparison | None = None
    _restores = False

    def _compare_ranks(self, trainer: Trainer | None, *objects: object) -> None:
        """Compare everything that is given before ranks talk; the layout, too, so over the store where they meet alone.

        Args:
            trainer: the Trainer.
            *objects: what it was handed.

        Raises:
            ConfigError: on all ranks, with every difference.
        """
        if self.num_nodes * self.num_processes == 1:
            return
        if self.lightning_module is not None and trainer is not None:
            self.lightning_module.trainer = trainer  # Lightning's next step
        self._take_device()
        store, ranks = self._meet(), (self.global_rank, self.world_size)
        if store is not None:
            self._restores, self._comparison = False, RankComparison(store, *ranks, self._may_differ)
            given = self.lightning_module, objects
            self._compare(start_statement(self.settings, self._wished_layout, *ranks, *given))

    def setup_environment(self) -> None:
        """Compare, if no launcher has seen to it."""
        super().setup_environment()
        if self._comparison is None:
            self._compare_ranks(None)

    def _end_run(self) -> None:
        """Let the next run compare anew."""
        self._comparison = None
        super()._end_run()

    def _compare(self, statement: Statement) -> None:
        if self._comparison is not None:
            Call(self._recorder.main, Kind.RENDEZVOUS, "world", 0).run(self._comparison.compare, statement)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers, and compare them, and the model that has been built by now."""
        super().setup_optimizers(trainer)
        if self._comparison is not None and self.lightning_module is not None:
            stage = self.mesh.pp.rank
            given = self.lightning_module, self.optimizers, self.lr_scheduler_configs, stage
            self._compare(optimizer_statement(*given))

    def process_dataloader(self, dataloader: object) -> object:
        """Compare what a loader says of itself, before Lightning asks all ranks for its length."""
        if self._comparison is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            stage = None if trainer.state.stage is None else trainer.state.stage.dataloader_prefix
            given = stage or "val", self.mesh.dp.rank
            self._compare(loader_statement(dataloader, *given, may_be_empty=may_stay_away(trainer)))
        return super().process_dataloader(dataloader)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, once it is sure that all ranks do."""
        self._compare_restoring(True)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; a rank without a checkpoint comes to the end of restoring all the same."""
        if name in _AFTER_RESTORING:
            self._compare_restoring(False)
        super().barrier(name)

    def _compare_restoring(self, restores: bool) -> None:
        if self._comparison is not None and not self._restores:
            self._restores = True
            self._compare(Statement({"trainer.ckpt_path": "a checkpoint" if restores else None}))

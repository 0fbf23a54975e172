"""Check that validation, test and prediction end after the same batch on ranks that wait for each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.lightning.streams.batch_watch import BatchWatch
from lightning_megatron.lightning.streams.end_of_data import DataState, EndOfDataCheck
from lightning_megatron.lightning.streams.lengths import gather_counts, require_equal_lengths
from lightning_megatron.mesh import Axis, ParallelMesh, dense_grid, expert_grid, rank_groups


def coupled_ranks(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Sets of ranks that wait for each other in every forward: those of a replica, and of replicas that share experts.

    The layout must be resolved.
    """
    parts = [set(ranks) for ranks in rank_groups(dense_grid(layout), ["tp", "cp", "pp"])]
    for shared in rank_groups(expert_grid(layout), ["etp", "ep"]):
        joined = [part for part in parts if part & set(shared)]
        parts = [part for part in parts if part not in joined] + [set().union(*joined)]
    return sorted(tuple(sorted(part)) for part in parts)


class EvaluationWatch(Callback):
    """Compares numbers of batches before a loop; if they are not known in advance, checks at each batch.

    Replicas that share no experts may have different numbers. ``MegatronStrategy`` adds this as the first callback.

    Args:
        timeout: timeout of the groups that are created for the checks.
        batches: watch over the batches, notified of the start and end of each.
    """

    def __init__(self, mesh: ParallelMesh, timeout: timedelta, batches: BatchWatch) -> None:
        self._mesh, self._timeout, self._watch = mesh, timeout, batches
        self._coupled = coupled_ranks(mesh.layout)
        self._hosts: Axis | None = None
        self._check = EndOfDataCheck()
        self._batches = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare numbers of batches; here and below, a difference is a ``DataError`` on all ranks that it concerns."""
        self._batches = 0
        if len(self._coupled[0]) == 1 or may_stay_away(trainer, self._mesh.layout):
            return
        self._watch.compare()
        assert trainer.state.stage is not None
        stage = trainer.state.stage.dataloader_prefix
        counts = getattr(trainer, "num_sanity_val_batches" if trainer.sanity_checking else f"num_{stage}_batches")
        of_ranks, certain = gather_counts(self._mesh, counts, getattr(trainer, f"{stage}_dataloaders"))
        names = f"{stage} data", f"limit_{stage}_batches"
        if certain:
            for ranks in self._coupled:
                require_equal_lengths({rank: of_ranks[rank] for rank in ranks}, *names)
        else:
            self._check = EndOfDataCheck(self._coupled_hosts(), *names)

    on_test_start = on_predict_start = on_validation_start

    def _coupled_hosts(self) -> Axis | None:
        """Axis of the ranks that wait for each other; all ranks create the groups together, at the first use."""
        if len(self._coupled) == 1:
            return self._mesh.host
        if self._hosts is None:
            self._hosts = self._mesh.host_axis("coupled hosts", self._coupled, self._timeout)
        return self._hosts

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **_: Any) -> None:
        """Check that the other ranks have a batch too; notify the watch over the batches."""
        self._watch.begin_batch(pl_module)
        self._batches += 1
        self._check.begin(DataState.MORE, self._batches)
        self._check.settle()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **_: Any) -> None:
        """Notify the watch over the batches."""
        _, batch, _, *loader = args
        self._watch.end_batch(pl_module, batch, *loader)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the data of the other ranks have ended too."""
        self._check.begin(DataState.ENDED, self._batches)
        self._check.settle()
        self._check = EndOfDataCheck()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end


def may_stay_away(trainer: Trainer, layout: ParallelLayout) -> bool:
    """True if a rank without any batch may skip the evaluation; never if replicas share experts."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    allowed = any(getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False) for owner in owners)
    return allowed and len(coupled_ranks(layout)[0]) == layout.tp * layout.cp * layout.pp

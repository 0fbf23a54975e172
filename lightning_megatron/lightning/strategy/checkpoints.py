"""The state of a run, saved to files and loaded from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_megatron.checkpoint import OpenCheckpoint, Progress, open_checkpoint
from lightning_megatron.errors import CheckpointError, raise_if_any
from lightning_megatron.files import PathLike
from lightning_megatron.lightning import checkpointing, pretrained
from lightning_megatron.lightning.compat._private import trainer_of
from lightning_megatron.lightning.run_state.progress import follow_batch_size, put_positions_aside, restore_positions
from lightning_megatron.lightning.run_state.random_state import random_state, restore_random_state
from lightning_megatron.lightning.strategy.folders import SaveFolders
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.lightning.strategy.trained_parameters import TrainedParameters, is_fitting
from lightning_megatron.lightning.strategy.writers import RunWriter
from lightning_megatron.lightning.validation.saving import address_problems
from lightning_megatron.mesh import ParallelMesh

if TYPE_CHECKING:
    from lightning_megatron.checkpoint import Check, SaveGuard

_log = logging.getLogger(__name__)


class ResumedRandomness:
    """Random numbers of a resumed run, equal to those of an uninterrupted run.

    Where resuming itself draws from the generators, they are reset to a saved state.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks = ranks
        self._saved: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        self._is_due = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ResumedRandomness:
        return self  # loaders refer to it, also those of a copy of the Trainer

    def load(self, saved: dict[str, Any] | None) -> None:
        """Take the state in a checkpoint, for :meth:`go_on`; ``None`` for a checkpoint without one."""
        self._saved, self._is_due = saved, True

    def go_on(self) -> None:
        """Set every generator to the loaded state; no action in later calls.

        It is called when the training loaders exist, before their iterators. So what ``train_dataloader`` draws, such
        as a split, is what it drew when the run began, and training draws what follows the checkpoint.
        """
        if self._is_due:
            self._restore()

    def _restore(self) -> None:
        self._is_due = False
        if self._saved is not None:
            restore_random_state(self._saved, self._ranks.mesh.rng)

    def go_on_reading(self) -> None:
        """Before a loader reads the rest of an epoch, which may draw, set every generator to the loaded state, once."""
        self._restore()
        self._saved = None

    def begin_batch(self, batch_idx: int) -> None:
        """Resume in mid-epoch with the random numbers of the uninterrupted run.

        A new loader iterator draws a seed from torch's generator, which the uninterrupted run did not do in mid-epoch.
        """
        if batch_idx > 0:
            self._restore()
        self._saved = None

    def begin_validation(self, *, sanity_checking: bool) -> None:
        """Give a validation that is repeated after resuming the random numbers of its first attempt."""
        if not sanity_checking:
            self._restore()
            self._validation = random_state(self._ranks.mesh.rng)

    def end_validation(self, *, sanity_checking: bool) -> None:
        """Let the first training batch after a repeated validation continue from the present state."""
        self._validation = None
        if self._saved is not None and not sanity_checking:
            self._saved = random_state(self._ranks.mesh.rng)

    def rewind_validation(self) -> None:
        """Set every generator to its state at the start of the current validation, which a resumed run repeats."""
        if self._validation is not None:
            restore_random_state(self._validation, self._ranks.mesh.rng)


class RunCheckpoints:
    """Sharded checkpoints of the model and of optimizers on flat buffers; all ranks call every method.

    Attributes:
        ranks: this rank and the others.
        folders: folders of the run.
        writer: writer of files.
        randomness: random numbers of a resumed run.
        load_check: extent to which files are compared with the manifest before they are loaded.
        saved: paths of the checkpoints that this run has written or resumed from, with their steps.
    """

    def __init__(self, ranks: JobRanks, params: TrainedParameters) -> None:
        self.ranks, self._params, self._job = ranks, params, ranks.job
        self.folders, self.writer, self.randomness = SaveFolders(ranks), RunWriter(), ResumedRandomness(ranks)
        self.load_check: Check = "hashes" if self._job.verify_on_load else "sizes"
        self.saved: dict[str, int] = {}
        self._shown: dict[str, Any] = {}
        self._loaded: checkpointing.LoadedModel | None = None
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._written: list[str] = []
        self._settings: tuple[Any, Any, int] = [], [], 0
        self._opened: OpenCheckpoint | None = None

    def open(self, trainer: Trainer) -> None:
        """Lock the folders of a fit against other runs, and start a background writer if asked for.

        Raises:
            CheckpointError: if another run saves there.
        """
        self._close_writer()  # left by a fit that an error ended before its teardown
        self._loaded = None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self.folders.hold(trainer)
        if self._job.async_save:
            self.writer.open_background(self.ranks.mesh, self.ranks.timeout)

    # Saving

    def save(self, checkpoint: dict[str, Any], filepath: Any, guard: SaveGuard | None) -> None:
        """Write Lightning's dictionary, or begin to in the background; ``guard`` checks it before it is published."""
        raise_if_any(address_problems("filepath", filepath))
        put_positions_aside(checkpoint)
        self._params.finish_finite_checks()
        self._params.settle()
        path, lost = self.ranks.broadcast((str(filepath), self.folders.lost()))
        if lost:
            raise CheckpointError(f"saving {path}: {lost}")
        goes_on, has_optimizers = is_fitting(self.ranks.module), "optimizer_states" in checkpoint
        if not goes_on:
            self.finish()
        checkpointing.save_trainer_checkpoint(
            path,
            checkpoint,
            self.ranks.module,
            self._params.sharded,
            self._saving_mesh(checkpoint),
            sharded=self._job.optimizer.shard,
            one_file=not self._job.save_distributed_checkpoint,
            guard=guard,
            finite=self._job.check_for_nan_in_loss_and_grad,
            progress=self.folders.next_progress(checkpoint["global_step"]) if has_optimizers else None,
            write=(self.writer if goes_on else RunWriter()).write,
        )
        self._note_path(filepath, checkpoint)

    def _saving_mesh(self, checkpoint: Mapping[str, Any]) -> ParallelMesh:
        """The mesh; before the first run of the Trainer, one of a single rank, if the job has only one."""
        if self.ranks.is_connected:
            return self.ranks.mesh
        size = self.ranks.num_local * self.ranks.num_nodes
        if size > 1 or not checkpoint["state_dict"]:
            what = "no parameters yet" if size == 1 else "no processes yet"
            raise RuntimeError(
                f"save_checkpoint before fit, validate, test or predict: there are {what}. They come with the first of"
                " these calls: save after it, or in a hook such as on_fit_start"
            )
        return ParallelMesh.single(self.ranks.strategy.root_device)

    def _note_path(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        if self.ranks.is_connected and "optimizer_states" in checkpoint:
            self.saved[str(path)] = int(checkpoint["global_step"])

    def finish(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is durable.

        Raises:
            CheckpointError: if writing has failed; only logged if another exception is ending the run.
        """
        with self._unless_interrupted():
            self.writer.wait()

    # Loading

    def open_once(self, item: Any) -> Any:
        """Open the checkpoint at a path once for all checks before the load; return any other object as it is."""
        if not isinstance(item, str | os.PathLike) or not os.path.exists(item):
            return item
        before, self._opened = self._opened, None
        given = before if before is not None and before.path == Path(item) else item
        with suppress(CheckpointError):  # loading reports it, or takes an older checkpoint
            self._opened = open_checkpoint(given, check="sizes")
        return self._opened or item

    def load(self, checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Load a checkpoint of any layout in place, or the weights of a Hugging Face directory."""
        raise_if_any(address_problems("ckpt_path", checkpoint_path))
        self.finish()
        module, path, check = self.ranks.module, str(checkpoint_path), self.load_check
        if self.folders.goes_on_from_last:
            path, check = self.folders.newest_good(check), "sizes"  # its content has been checked
        path, opened, self._opened = self.ranks.broadcast(path), self._opened, None
        given = opened if opened is not None and opened.path == Path(path) else path
        loaded = self._load_model(given, check, weights_only, fits=is_fitting(module))
        checkpoint = loaded.checkpoint
        told = None if loaded.opened is None else loaded.opened.progress
        self.folders.went_on(told or Progress(0, checkpoint.get("global_step", 0)))
        pretrained.take_settings(module, checkpoint)
        restore_positions(checkpoint)
        follow_batch_size(checkpoint, getattr(trainer_of(module), "datamodule", None))
        self._note_path(checkpoint_path, checkpoint)
        if self._params.sharded and is_fitting(module):
            # In the middle of a run: a tuner restores the state at its start.
            self._fill_optimizers(loaded)
            self.randomness.load(loaded.randomness)
            self.randomness.go_on()
        else:
            self._loaded = loaded
            self._params.refresh_main()  # of an earlier fit, before an evaluation
        return checkpoint

    def _load_model(
        self, path: PathLike, check: Check, weights_only: bool | None, *, fits: bool
    ) -> checkpointing.LoadedModel:
        self._params.finish_gather()
        is_alone = not self.ranks.is_connected and self.ranks.num_local * self.ranks.num_nodes == 1
        loaded = checkpointing.load_model(
            path,
            self.ranks.module,
            ParallelMesh.single(self.ranks.strategy.root_device) if is_alone else self.ranks.mesh,
            fits=fits,
            weights_only=weights_only,
            check=check,
            finite=self._job.check_for_nan_in_loss_and_grad,
        )
        self._shown, self._stamps, self._written = dict(loaded.checkpoint["state_dict"]), _stamps(self.ranks.module), []
        return loaded

    def forget_shown(self) -> None:
        """Release the weights that hooks were shown, before the model gets its memory for training."""
        if self._loaded is not None:
            self._loaded.checkpoint["state_dict"] = self._shown = {}
            self._written = [n for n, stamp in _stamps(self.ranks.module).items() if self._stamps.get(n) != stamp]

    def load_optimizers(self) -> None:
        """Load optimizer state, and set parameters from main values, except those that hooks have written since."""
        if (loaded := self._loaded) is None:
            return
        named, before = dict(self.ranks.module.named_parameters()), self._group_settings()
        written = {name: named[name].detach().clone() for name in self._written}
        self._fill_optimizers(loaded)
        for name, value in written.items():
            named[name].detach().copy_(value)
        self._settings = before, self._group_settings(), len(self.ranks.strategy.lr_scheduler_configs)

    def _fill_optimizers(self, loaded: checkpointing.LoadedModel) -> None:
        if loaded.opened is None:
            self._params.refresh_main()
        else:
            loaded.checkpoint["lr_schedulers"] = checkpointing.load_optimizers(
                loaded.opened,
                self.ranks.module,
                self._params.sharded,
                sharded=self._job.optimizer.shard,
                finite=self._job.check_for_nan_in_loss_and_grad,
                lr_schedulers=loaded.checkpoint.get("lr_schedulers", ()),
            )

    def go_on(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the checkpoint's group settings, whatever hooks have changed since; random numbers come later."""
        loaded, schedulers = self._loaded, self.ranks.strategy.lr_scheduler_configs
        if loaded is None or checkpoint is not loaded.checkpoint:
            return
        before, restored, number = self._settings
        self._set_groups(restored)
        self.randomness.load(loaded.randomness)
        self._loaded = None
        if checkpoint.get("global_step") and len(schedulers) == number:  # a callback may have added its own
            saved = checkpoint.get("lr_schedulers", ())
            checkpointing.tell_other_settings(str(loaded.opened), before, self._params.sharded, schedulers, saved)

    def _group_settings(self) -> list[list[dict[str, Any]]]:
        return [optimizer.group_settings() for optimizer in self._params.sharded]

    def _set_groups(self, settings: list[list[dict[str, Any]]]) -> None:
        for optimizer, own in zip(self._params.sharded, settings, strict=True):
            optimizer.load_group_settings(own)

    def load_edits(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the entries of ``state_dict`` that a hook has changed after :meth:`load`."""
        given, self._shown = self._shown, {}
        edited = {name: value for name, value in checkpoint["state_dict"].items() if value is not given.get(name)}
        if edited:
            self.ranks.module.load_state_dict({**self.ranks.module.state_dict(), **edited}, strict=strict)
            self._params.refresh_main()

    def rewind(self, path: str) -> None:
        """Load parameters, buffers and optimizer state between two steps; keep everything else."""
        module = self.ranks.module
        self.finish()
        settings = self._group_settings()
        loaded = self._load_model(path, self.load_check, None, fits=True)
        self._fill_optimizers(loaded)
        self._set_groups(settings)
        module.on_load_checkpoint(loaded.checkpoint)
        self.load_edits(loaded.checkpoint, strict=module.strict_loading)

    # The end

    def _close_writer(self) -> None:
        with self._unless_interrupted():
            self.writer.close()

    def close(self) -> None:
        """Finish parameter gathers and background writes, and unlock the folders."""
        self._loaded, self.randomness = None, ResumedRandomness(self.ranks)  # unused state must not reach another run
        self._params.end_run()
        try:
            self._close_writer()
        finally:
            self.folders.release()

    @contextmanager
    def _unless_interrupted(self) -> Generator[None, None, None]:
        try:
            yield
        except CheckpointError as error:
            module = self.ranks.strategy.lightning_module
            if module is None or not module.trainer.interrupted:
                raise
            _log.error("%s", error)


def _stamps(module: LightningModule) -> dict[str, tuple[int, ...]]:
    """Values that change when a parameter is written in place or gets other memory, by name."""
    return {name: (id(param), param._version, param.data_ptr()) for name, param in module.named_parameters()}

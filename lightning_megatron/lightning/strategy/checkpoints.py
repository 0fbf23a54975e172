"""The second layer of the strategy: the state of a run, saved to files and loaded from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint import OpenCheckpoint, open_checkpoint
from lightning_megatron.errors import CheckpointError, raise_if_any
from lightning_megatron.lightning import checkpointing, pretrained
from lightning_megatron.lightning.run_state.progress import follow_batch_size
from lightning_megatron.lightning.step.optimizers import Holder, OptimizerSet
from lightning_megatron.lightning.strategy.folders import SaveFolders
from lightning_megatron.lightning.strategy.mesh import MeshStrategy
from lightning_megatron.lightning.strategy.randomness import ResumedRandomness
from lightning_megatron.lightning.strategy.writers import AsyncWriter, DirectWriter
from lightning_megatron.lightning.validation.saving import address_problems
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer

if TYPE_CHECKING:
    from lightning_megatron.checkpoint import Check, SaveGuard
    from lightning_megatron.checkpoint.optimizer_export.export import Collectors, HostMemory

_log = logging.getLogger(__name__)


class CheckpointStrategy(MeshStrategy):
    """Sharded checkpoints of the model and of optimizers on flat buffers.

    Args:
        job: settings of the job.
        **parts: objects that any strategy of Lightning may be given.

    Attributes:
        save_guard: check of a checkpoint before it gets its name; ``None`` for no check.
    """

    def __init__(self, job: JobSettings, **parts: Any) -> None:
        super().__init__(job, **parts)
        self.save_guard: SaveGuard | None = None
        self._folders = SaveFolders(self)
        self._writer = DirectWriter()
        self._randomness = ResumedRandomness()
        self._optimizer_set: OptimizerSet | None = None
        self._loaded_model: dict[str, Any] | None = None
        self._opened: OpenCheckpoint | None = None
        self._saved: dict[str, int] = {}

    @property
    def sharded_optimizers(self) -> tuple[ShardedOptimizer, ...]:
        """The distributed optimizers, one for each of the user's; none outside ``fit``."""
        return () if self._optimizer_set is None else tuple(self._optimizer_set.sharded)

    def _release_optimizers(self) -> None:
        """Release the parameters; before new optimizers, the strategy of an earlier Trainer does so, too."""
        module = self.lightning_module
        if module is not None and self._is_fitting:
            earlier = vars(module).get("_megatron_holder")
            if isinstance(earlier, Holder) and isinstance(strategy := earlier.strategy, CheckpointStrategy):
                strategy._take_apart()
            module._megatron_holder = Holder(self)  # type: ignore[assignment] # on a module of any class
        self._take_apart()

    def _take_apart(self) -> None:
        if self._optimizer_set is not None:
            self._optimizer_set.close()
        self._optimizer_set = None
        self.optimizers = []
        self.lr_scheduler_configs = []

    def finish_param_gather(self) -> None:
        """Wait until all parameters have the values of the last step; their modules' forwards wait by themselves."""
        if self._optimizer_set is not None:
            self._optimizer_set.finish_param_gather()

    def _finish_finite_checks(self) -> None:
        if self._optimizer_set is not None:
            self._optimizer_set.finish_finite_checks()

    def _settle_params(self) -> None:
        self.finish_param_gather()
        for optimizer in self.sharded_optimizers:
            optimizer.copy_written_values()

    def refresh_main_params(self) -> None:
        """Make all main values those of the parameters, at once.

        Weights written between steps are noticed without it, at the next step or save.
        """
        for optimizer in self.sharded_optimizers:
            optimizer.refresh_main()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always: parameters and optimizer state are loaded in place, so they must exist first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Never: optimizer state is loaded with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the model."""
        assert self.lightning_module is not None
        self.finish_param_gather()
        return self.lightning_module.state_dict()

    def main_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict`` with main values in the place of parameters, on the host; all ranks call this.

        After ``bf16-mixed`` and ``16-mixed`` the module's parameters are half precision; these are the fp32 values that
        have been trained. They exist from the start of a ``fit`` to that of the next. As in ``state_dict``, a rank has
        its shard of parameters that tensor and pipeline parallelism split.
        """
        assert self.lightning_module is not None
        self._settle_params()
        mains: dict[Any, Any] = {}
        for optimizer in self.sharded_optimizers:
            mains |= optimizer.main_values()
        state = self.lightning_module.state_dict(keep_vars=True)
        return {name: mains[value] if value in mains else _on_host(value) for name, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` writes optimizer state straight to the files."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint; called by all ranks.

        With ``async_save``, while a fit is running, this returns as soon as the model is copied to the host. Optimizer
        state is copied behind the next forward and backward: the optimizer's step waits for it.

        Raises:
            CheckpointError: if this save has failed, or the one before, which was written in the background.
            RuntimeError: before the model is built, or the processes of the job have started.
            TypeError: for ``storage_options``, which no sharded strategy of Lightning takes.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes local directories and takes no storage_options")
        assert self.lightning_module is not None
        raise_if_any(address_problems("filepath", filepath))
        self._finish_finite_checks()
        self._settle_params()
        path, lost = self.broadcast((str(filepath), self._folders.lost()))
        if lost:
            raise CheckpointError(f"saving {path}: {lost}")
        is_fitting, has_optimizers = self._is_fitting, "optimizer_states" in checkpoint
        if not is_fitting:
            self.finish_save()
        checkpointing.save_trainer_checkpoint(
            path,
            checkpoint,
            self.lightning_module,
            self.sharded_optimizers,
            self._saving_mesh(checkpoint),
            sharded=self._job.optimizer.shard,
            guard=self.save_guard,
            finite=self._job.check_for_nan_in_loss_and_grad,
            progress=self._folders.next_progress(checkpoint["global_step"]) if has_optimizers else None,
            write=(self._writer if is_fitting else DirectWriter()).write,
        )
        self._note_path(filepath, checkpoint)

    @property
    def _is_fitting(self) -> bool:
        """True if steps go on after a save; if not, the caller may copy the files next, or exit."""
        try:
            state = self.lightning_module.trainer.state  # type: ignore[union-attr]
        except RuntimeError:  # a module without a Trainer
            return False
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def _saving_mesh(self, checkpoint: Mapping[str, Any]) -> ParallelMesh:
        """The mesh; before a Trainer has run anything, one of one rank if the job has no more."""
        if self._mesh is not None:
            return self._mesh
        if self.num_processes * self.num_nodes > 1 or not checkpoint["state_dict"]:
            what = "no parameters yet" if self.num_processes * self.num_nodes == 1 else "no processes yet"
            raise RuntimeError(
                f"save_checkpoint before fit, validate, test or predict: there are {what}. They come with the first of"
                " these calls: save after it, or in a hook such as on_fit_start"
            )
        return ParallelMesh.single(self.root_device)

    def open_once(self, item: Any) -> Any:
        """The checkpoint at a path, open for all that look at it before it is loaded; any other object as it is."""
        if not isinstance(item, str | os.PathLike) or not os.path.exists(item):
            return item
        before, self._opened = self._opened, None
        given = before if before is not None and before.path == Path(item) else item
        with suppress(CheckpointError):  # loading says so, or takes an older one in its place
            self._opened = open_checkpoint(given, check="sizes")
        return self._opened or item

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any layout in place, or the weights of a Hugging Face directory; called by all ranks.

        ``fit(ckpt_path="last")`` goes on from the newest good checkpoint of the folder.
        """
        assert self.lightning_module is not None
        raise_if_any(address_problems("ckpt_path", checkpoint_path))
        self.finish_save()
        path, check = str(checkpoint_path), self.load_check
        if self._folders.goes_on_from_last:
            path, check = self._folders.newest_good(check), "sizes"  # its content has been checked
        settings = [optimizer.group_settings() for optimizer in self.sharded_optimizers]
        path = self.broadcast(path)
        opened, self._opened = self._opened, None
        checkpoint, randomness = checkpointing.load_trainer_checkpoint(
            opened if opened is not None and opened.path == Path(path) else path,
            self.lightning_module,
            self.sharded_optimizers,
            self.mesh,
            sharded=self._job.optimizer.shard,
            weights_only=weights_only,
            check=check,
            finite=self._job.check_for_nan_in_loss_and_grad,
        )
        if self._is_fitting and checkpoint.get("global_step"):
            schedulers = self.lr_scheduler_configs, checkpoint.get("lr_schedulers", ())
            checkpointing.tell_other_settings(path, settings, self.sharded_optimizers, *schedulers)
        self._folders.went_on(path, checkpoint.get("global_step", 0))
        pretrained.take_settings(self.lightning_module, checkpoint)
        self._randomness.load(randomness if self._is_fitting else None, self.mesh)
        self._loaded_model = dict(checkpoint["state_dict"])
        follow_batch_size(checkpoint, getattr(self.lightning_module.trainer, "datamodule", None))
        self._note_path(checkpoint_path, checkpoint)
        return checkpoint

    # Going back

    @property
    def saved_in_run(self) -> Mapping[str, int]:
        """Paths of the checkpoints that this run has written or has gone on from, with their steps."""
        return self._saved

    def _note_path(self, path: Any, checkpoint: Mapping[str, Any]) -> None:
        if self._mesh is not None and "optimizer_states" in checkpoint:
            self._saved[str(path)] = int(checkpoint["global_step"])

    def rewind(self, path: str) -> None:
        """Load parameters, buffers and optimizer state from a checkpoint; called by all ranks between two steps.

        Steps, samples, learning rates and their schedules, the loss scale and random numbers go on as they are: the
        samples since the checkpoint are not read again. Reading them again would lead to the same state again.

        Args:
            path: path of a checkpoint with optimizer state.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        module = self.lightning_module
        assert module is not None
        self.finish_save()
        self.finish_param_gather()
        settings = [optimizer.group_settings() for optimizer in self.sharded_optimizers]
        checkpoint, _ = checkpointing.load_trainer_checkpoint(
            path,
            module,
            self.sharded_optimizers,
            self.mesh,
            sharded=self._job.optimizer.shard,
            weights_only=None,
            check=self.load_check,
            finite=self._job.check_for_nan_in_loss_and_grad,
        )
        for optimizer, today in zip(self.sharded_optimizers, settings, strict=True):
            optimizer.load_group_settings(today)
        self._loaded_model = dict(checkpoint["state_dict"])
        module.on_load_checkpoint(checkpoint)
        self.load_model_state_dict(checkpoint, strict=module.strict_loading)

    @property
    def load_check(self) -> Check:
        """Extent to which the files of a checkpoint are compared with its manifest before it is loaded."""
        return "hashes" if self._job.verify_on_load else "sizes"

    def rewind_validation(self) -> None:
        """Set every generator to its state at the start of the current validation, which a resumed run repeats."""
        self._randomness.rewind_validation(self.mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the entries of ``state_dict`` that a hook has changed; :meth:`load_checkpoint` has loaded the others."""
        assert self.lightning_module is not None
        given, self._loaded_model = self._loaded_model or {}, None
        edited = {name: value for name, value in checkpoint["state_dict"].items() if value is not given.get(name)}
        if edited:
            self.lightning_module.load_state_dict({**self.lightning_module.state_dict(), **edited}, strict=strict)
            self.refresh_main_params()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """No action: :meth:`load_checkpoint` has filled the optimizers."""

    def export_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Write the state of all optimizers to one safetensors file; called by all ranks while ``fit`` runs.

        Tensors have global names and the shapes of whole parameters. Neither layout nor level changes a byte.

        Args:
            path: the file, on a file system that the nodes share; it has its name when it is complete.
            memory_level: part of it that is in host memory at once: ``"parallel_node_0"``, ``"parallel_multi_node"``,
                ``"serial_per_node"`` or ``"serial_per_dp_groups"``.
            ranks_per_node: processes on a node; ``None`` for the Trainer's number.

        Returns:
            Host memory that it took on this rank.
        """
        through = self._collectors(memory_level, ranks_per_node)
        self._settle_params()
        return checkpointing.export_optimizers(
            path, self.sharded_optimizers, through, sharded=self._job.optimizer.shard
        )

    def load_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Fill the optimizers, and the parameters from their main values, from such a file; arguments as there."""
        through = self._collectors(memory_level, ranks_per_node)
        return checkpointing.import_optimizers(
            path, self.sharded_optimizers, through, sharded=self._job.optimizer.shard
        )

    def _collectors(self, level: str, ranks_per_node: int | None) -> Collectors:
        if not self.sharded_optimizers:
            raise RuntimeError("there are optimizers only while fit runs: call this in a hook such as on_train_start")
        from lightning_megatron.checkpoint.optimizer_export.export import Collectors

        return Collectors(self.mesh, level, ranks_per_node or max(1, self.world_size // self.num_nodes))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, on one rank, once the newer one is durable and no link leads to it.

        ``ModelCheckpoint`` changes its link to the newer one only after this call.
        """
        if self.is_global_zero:
            self._writer.remove(Path(filepath))

    # Writers

    def _open_saving(self, trainer: Trainer) -> None:
        """Close the folders of a fit to other runs, and start a writer in the background if asked for.

        Raises:
            CheckpointError: if another run saves there.
        """
        self._close_writer()  # left by a fit that an error ended before its teardown
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._folders.hold(trainer)
        if self._job.async_save:
            self._writer = AsyncWriter(self.mesh, self.collective_timeout, self._writer.removals)

    def finish_save(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is durable; called by all ranks.

        Raises:
            CheckpointError: if it has failed. Where another exception is ending the run, this one is logged instead.
        """
        with self._unless_interrupted():
            self._writer.wait()

    def finish_copy(self) -> None:
        """Wait until no save reads optimizer state any more. Code that writes into it between steps calls this first.

        Steps of optimizers, loads and all else in this package do so themselves.
        """
        self._writer.finish_copy()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, DirectWriter(self._writer.removals)
        with self._unless_interrupted():
            writer.close()

    def _end_saving(self) -> None:
        """Leave whole parameters and durable files, and open their folders to other runs."""
        self._randomness = ResumedRandomness()  # what was not used is no other run's
        self.finish_param_gather()
        try:
            self._close_writer()
        finally:
            self._folders.release()

    @contextmanager
    def _unless_interrupted(self) -> Generator[None, None, None]:
        try:
            yield
        except CheckpointError as error:
            if self.lightning_module is None or not self.lightning_module.trainer.interrupted:
                raise
            _log.error("%s", error)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value

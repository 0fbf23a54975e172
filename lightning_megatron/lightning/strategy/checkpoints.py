"""A strategy that knows where the state of a run lies, and takes it to files and back."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.checkpoint import BackgroundWriter, Check, CheckpointError, SaveGuard, remove_unlinked
from lightning_megatron.checkpoint.optimizer_export.export import Collectors, HostMemory
from lightning_megatron.errors import raise_if_any
from lightning_megatron.lightning.checkpointing.missed_saves import warn_of_missed_saves
from lightning_megatron.lightning.checkpointing.optimizer_file import export_optimizers, import_optimizers
from lightning_megatron.lightning.checkpointing.progress import follow_batch_size
from lightning_megatron.lightning.checkpointing.random_state import random_state
from lightning_megatron.lightning.checkpointing.trainer_state import (
    continue_randomness,
    load_trainer_checkpoint,
    save_trainer_checkpoint,
)
from lightning_megatron.lightning.pretrained.hugging_face import take_settings
from lightning_megatron.lightning.step.optimizers import Holder, OptimizerSet
from lightning_megatron.lightning.strategy.folders import FolderStrategy
from lightning_megatron.lightning.validation.saving import address_problems
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer

_log = logging.getLogger(__name__)


class CheckpointStrategy(FolderStrategy):
    """Sharded checkpoints of the model and of optimizers on flat buffers.

    Attributes:
        save_guard: what looks at a checkpoint before it gets its name.
    """

    save_guard: SaveGuard | None = None

    _async_save: bool = False
    _verify_on_load: bool = True
    _check_for_nan: bool = True
    _writer: BackgroundWriter | None = None
    _removals: Sequence[Path] = ()
    _distributed_optimizer: bool = True
    _optimizer_set: OptimizerSet | None = None
    _loaded_model: dict[str, Any] | None = None
    _saved_randomness: dict[str, Any] | None = None
    _validation_randomness: dict[str, Any] | None = None

    @property
    def sharded_optimizers(self) -> tuple[ShardedOptimizer, ...]:
        """The distributed optimizers, one for each of the user's; none outside ``fit``."""
        return () if self._optimizer_set is None else tuple(self._optimizer_set.sharded)

    def _release_optimizers(self) -> None:
        """Let go of the parameters; where new optimizers come, so does the strategy of an earlier Trainer."""
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

    def _settle_finite(self) -> None:
        if self._optimizer_set is not None:
            self._optimizer_set.settle_finite()

    def _settle_params(self) -> None:
        self.finish_param_gather()
        for optimizer in self.sharded_optimizers:
            optimizer.take_written_values()

    def refresh_main_params(self) -> None:
        """Make all main values those of the parameters, at once.

        Weights written between steps are noticed without it, at the next step or save.
        """
        for optimizer in self.sharded_optimizers:
            optimizer.refresh_main()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Parameters and optimizer state are loaded where they lie, so they must be there first."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizer state is loaded with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the model."""
        assert self.lightning_module is not None
        self.finish_param_gather()
        return self.lightning_module.state_dict()

    def main_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict`` with main values in the place of parameters, on the host; all ranks call this.

        After ``bf16-mixed`` and ``16-mixed`` the module's parameters are half precision; these are the fp32 values that
        have been trained. They are there from the begin of a ``fit`` to the begin of the next. As in ``state_dict``, a
        rank has its shard of what tensor and pipeline parallelism cut.
        """
        assert self.lightning_module is not None
        self._settle_params()
        mains: dict[Any, Any] = {}
        for optimizer in self.sharded_optimizers:
            mains |= optimizer.main_values()
        state = self.lightning_module.state_dict(keep_vars=True)
        return {name: mains[value] if value in mains else _on_host(value) for name, value in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: optimizer state goes from where it lies to the files, see :meth:`save_checkpoint`."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint; called by all ranks.

        With ``async_save``, while a fit is running, this returns as soon as the state is copied to the host.

        Raises:
            CheckpointError: if this save has failed, or the one before, which was written in the background.
            RuntimeError: before the model is built, or the processes of the job have started.
            TypeError: for ``storage_options``, which no sharded strategy of Lightning takes.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes local directories and takes no storage_options")
        assert self.lightning_module is not None
        raise_if_any(address_problems("filepath", filepath))
        self._settle_finite()
        self._settle_params()
        path, lost = self.broadcast((str(filepath), self._folders.lost() if self._folders else ""))
        if lost:
            raise CheckpointError(f"saving {path}: {lost}")
        is_fitting = self._is_fitting
        if not is_fitting:
            self.finish_save()
        save_trainer_checkpoint(
            path,
            checkpoint,
            self.lightning_module,
            self.sharded_optimizers,
            self._saving_mesh(checkpoint),
            sharded=self._distributed_optimizer,
            guard=self.save_guard,
            finite=self._check_for_nan,
            progress=self._next_progress(checkpoint["global_step"]) if "optimizer_states" in checkpoint else None,
            writer=self._writer if is_fitting else None,
        )

    @property
    def _is_fitting(self) -> bool:
        """True if steps go on after a save; if not, whoever saves may copy the files next, or exit."""
        try:
            state = self.lightning_module.trainer.state  # type: ignore[union-attr]
        except RuntimeError:  # a module that nobody but this strategy has been given
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

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any layout in place, or the weights of a Hugging Face directory; called by all ranks.

        ``fit(ckpt_path="last")`` goes on from the newest good checkpoint of the folder.
        """
        assert self.lightning_module is not None
        raise_if_any(address_problems("ckpt_path", checkpoint_path))
        self.finish_save()
        path, check = str(checkpoint_path), self.load_check
        if self._goes_on_from_last:
            path, check = self._newest_good(check), "sizes"  # it has been looked at
        checkpoint, self._saved_randomness = load_trainer_checkpoint(
            self.broadcast(path),
            self.lightning_module,
            self.sharded_optimizers,
            self.mesh,
            sharded=self._distributed_optimizer,
            weights_only=weights_only,
            check=check,
            finite=self._check_for_nan,
        )
        self._went_on(path, checkpoint.get("global_step", 0))
        take_settings(self.lightning_module, checkpoint)
        if self._saved_randomness is not None:
            continue_randomness(self._saved_randomness, self.mesh)
        self._loaded_model = dict(checkpoint["state_dict"])
        follow_batch_size(checkpoint, getattr(self.lightning_module.trainer, "datamodule", None))
        return checkpoint

    @property
    def load_check(self) -> Check:
        """The extent to which the files of a checkpoint are held against what was written, before it is loaded."""
        return "hashes" if self._verify_on_load else "sizes"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Resume in mid-epoch with the random numbers of the uninterrupted run.

        A loader that begins draws a seed from torch's generator, which it would not have done in mid-epoch.
        """
        if self._saved_randomness is not None and batch_idx > 0:
            continue_randomness(self._saved_randomness, self.mesh)
        self._saved_randomness = None
        if self._writer is not None:
            self._writer.catch_up()
        if self.lightning_module is not None:
            warn_of_missed_saves(self.lightning_module.trainer)

    def on_validation_start(self) -> None:
        """Draw in a validation that is begun anew the random numbers that it drew before."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.sanity_checking:
            return
        if self._saved_randomness is not None:
            continue_randomness(self._saved_randomness, self.mesh)
        self._validation_randomness = random_state(self.mesh.rng)

    def on_validation_end(self) -> None:
        """Let the first batch after a validation that was begun anew continue from here, as the uninterrupted run."""
        assert self.lightning_module is not None
        self._validation_randomness = None
        if self._saved_randomness is not None and not self.lightning_module.trainer.sanity_checking:
            self._saved_randomness = random_state(self.mesh.rng)

    def rewind_validation(self) -> None:
        """Set every generator to where the validation under way began, which a resumed run begins anew."""
        if self._validation_randomness is not None:
            continue_randomness(self._validation_randomness, self.mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what a hook has put into ``state_dict``; :meth:`load_checkpoint` has filled the parameters."""
        assert self.lightning_module is not None
        given, self._loaded_model = self._loaded_model or {}, None
        edited = {name: value for name, value in checkpoint["state_dict"].items() if value is not given.get(name)}
        if edited:
            self.lightning_module.load_state_dict({**self.lightning_module.state_dict(), **edited}, strict=strict)
            self.refresh_main_params()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the optimizers."""

    def export_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Write the state of all optimizers to one safetensors file; called by all ranks while ``fit`` runs.

        Tensors have global names and the shapes of whole parameters. Neither layout nor level changes a byte.

        Args:
            path: the file, on a file system that the nodes share; it has its name when it is complete.
            memory_level: how much of it is in host memory at once: ``"parallel_node_0"``, ``"parallel_multi_node"``,
                ``"serial_per_node"`` or ``"serial_per_dp_groups"``.
            ranks_per_node: processes on a node; ``None`` for those that this Trainer has started.

        Returns:
            What it took of this rank's host memory.
        """
        through = self._collectors(memory_level, ranks_per_node)
        self._settle_params()
        return export_optimizers(path, self.sharded_optimizers, through, sharded=self._distributed_optimizer)

    def load_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Fill the optimizers, and the parameters from their main values, from such a file; arguments as there."""
        through = self._collectors(memory_level, ranks_per_node)
        return import_optimizers(path, self.sharded_optimizers, through, sharded=self._distributed_optimizer)

    def _collectors(self, level: str, ranks_per_node: int | None) -> Collectors:
        if not self.sharded_optimizers:
            raise RuntimeError("there are optimizers only while fit runs: call this in a hook such as on_train_start")
        return Collectors(self.mesh, level, ranks_per_node or max(1, self.world_size // self.num_nodes))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; one rank does it, and not before the newer one is durable.

        Nor while a link leads to it: ``ModelCheckpoint`` leads its link to the newer one only after this.
        """
        if not self.is_global_zero:
            return
        if self._writer is None:
            self._removals = remove_unlinked([*self._removals, Path(filepath).absolute()])
        else:
            self._writer.remove(filepath)

    # Saving in the background

    def _open_saving(self, trainer: Trainer) -> None:
        """Have the folders of a fit to itself, and a writer for them where it saves in the background.

        Raises:
            CheckpointError: if another run saves there.
        """
        self._close_writer()  # of a fit that an error ended before its teardown
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._hold_folders(trainer)
        if self._async_save:
            self._writer = BackgroundWriter(self.mesh, self._timeout)

    def finish_save(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is durable; called by all ranks.

        Raises:
            CheckpointError: if it has failed. Where another exception is ending the run, this one is logged instead.
        """
        if self._writer is not None:
            with self._unless_interrupted():
                self._writer.wait()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._unless_interrupted():
                writer.close()

    def _end_run(self) -> None:
        """Leave whole parameters and durable files, and their folders to other runs."""
        self.finish_param_gather()
        try:
            self._close_writer()
        finally:
            self._leave_folders()

    @contextmanager
    def _unless_interrupted(self) -> Generator[None, None, None]:
        try:
            yield
        except CheckpointError as error:
            if self.lightning_module is None or not self.lightning_module.trainer.interrupted:
                raise
            _log.error("%s", error)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        ``ModelCheckpoint(save_last="link")`` calls this when it has led its link to a checkpoint that may not be there.
        """
        if self._writer is not None and self.is_global_zero:
            self._writer.keep_links()
        self._removals = remove_unlinked(self._removals)
        super().barrier(name)

    def on_train_start(self) -> None:
        """Refuse to begin with weights that are NaN or infinite, from wherever a script has taken them.

        Raises:
            NonFiniteError: on all ranks.
        """
        if self._check_for_nan and self._optimizer_set is not None:
            self._optimizer_set.check_params()

    def on_train_end(self) -> None:
        """Leave whole parameters behind, and durable checkpoints."""
        self._settle_finite()
        self.finish_param_gather()
        self.finish_save()


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value

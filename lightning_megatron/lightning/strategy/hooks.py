"""The hooks of the strategy: what Lightning calls, in the order of a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import checkpoint
from lightning_megatron import device as devices
from lightning_megatron.data.loading.plain_loader import resumable
from lightning_megatron.lightning.compat._private import agree_to_validate, injects_samplers
from lightning_megatron.lightning.compat.accelerator import enable_gpu_migration_on
from lightning_megatron.lightning.monitoring.known_warnings import KnownWarnings
from lightning_megatron.lightning.monitoring.late_bar import LateBar
from lightning_megatron.lightning.monitoring.model_summary import introduce
from lightning_megatron.lightning.monitoring.terminal import Terminal
from lightning_megatron.lightning.run_state.missed_saves import warn_of_missed_saves
from lightning_megatron.lightning.step.engine import StepEngine
from lightning_megatron.lightning.step.graphs import BlockGraphs
from lightning_megatron.lightning.step.op_report import write_op_report
from lightning_megatron.lightning.step.optimizers import decide_on_rank_0
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.lightning.strategy.checkpoints import RunCheckpoints
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.lightning.strategy.recording import ActionRecord
from lightning_megatron.lightning.strategy.start import OwnCallbacks, RankStart
from lightning_megatron.lightning.strategy.trained_parameters import HookGradients, TrainedParameters
from lightning_megatron.lightning.streams import EvaluationWatch, TrainingWatch
from lightning_megatron.lightning.streams.batch_watch import BatchWatch
from lightning_megatron.lightning.streams.dataloaders import prepared
from lightning_megatron.lightning.validation.idle import warn_of_idle
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.lightning.validation.slow import warn_of_slow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.stage import StageBoundary


class StrategyHooks(ParallelStrategy):
    """Start, steps, evaluation and end of a run.

    Args:
        job: settings of the job.
        **parts: arguments of Lightning's base class.

    Attributes:
        checkpoints: checkpoints of the run.
        save_guard: check of a checkpoint before it is published; ``None`` for no check.
        engine: the engine that runs the steps, from ``setup_environment`` on.
    """

    engine: StepEngine
    _kind_of_ranks: type[JobRanks] = JobRanks

    def __init__(self, job: JobSettings, **parts: Any) -> None:
        self._own_precision = MegatronPrecision()
        super().__init__(**parts)
        self.micro_batch_size = job.micro_batch_size
        self.boundary = StageBoundary(job.layout.pp * job.layout.vpp) if job.layout.pp > 1 else None
        self.save_guard: checkpoint.SaveGuard | None = None
        self._job, self._ranks = job, self._kind_of_ranks(self, job)
        self._record = ActionRecord(self._ranks)
        self._params = TrainedParameters(self._ranks)
        self.checkpoints = RunCheckpoints(self._ranks, self._params)
        self._terminal, self._known_warnings = Terminal(), KnownWarnings()
        self._start = RankStart(self._ranks, self._record, self._params, self.checkpoints)
        self._own_callbacks = OwnCallbacks(job.save_on_signal, job.layout)
        self._batches: BatchWatch | None = None
        self._validated = 0.0
        self._graphs = BlockGraphs()
        self._op_report_is_due = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._ranks.copied(memo)

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """A :class:`MegatronPrecision`: the user's, or one that adopts the precision that Lightning assigns."""
        # Lightning's own attribute, from which its connector reads a plugin that was given to the strategy.
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else self._own_precision.adopt(precision_plugin)

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups of this rank, from ``setup_environment`` on; a ``RuntimeError`` before."""
        return self._ranks.mesh

    # Start; the launcher has called `check`, `compare` and `find_last` of `RankStart` before

    def setup_environment(self) -> None:
        """Start the process groups; from here on :attr:`mesh` exists."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        self.checkpoints.saved, self._ranks.end.has_failed = {}, False
        self._own_callbacks.end()  # left by a run that an error ended before its teardown
        self._ranks.take_device()
        self._start.compare_once()
        self._own_callbacks.begin(trainer)
        if self._job.gpu_migration:
            enable_gpu_migration_on(self.root_device)
        self._start.check(self.lightning_module, getattr(trainer, "datamodule", None), trainer=trainer)
        self._start.connect()
        if (before := self._start.before) is not None and before.mesh is self.mesh:
            self.boundary = before.boundary  # the boundary that the reused model refers to
        self._known_warnings.open(one_replica=self.mesh.layout.data_parallel_size == 1)
        self._batches = watch = BatchWatch(self.mesh)
        self._ranks.trials.begin(trainer, self.mesh)
        self._own_callbacks.add(*self._record.begin(trainer), HookGradients(self._params), LateBar(self.mesh.world))
        self._own_callbacks.add(TrainingWatch(self.mesh, watch), EvaluationWatch(self.mesh, self._ranks.timeout, watch))
        self._own_callbacks.surround_averages(self._params)
        plugin, how = self.precision_plugin, (self.boundary, self._job.pipeline_schedule, self.micro_batch_size)
        self.engine = StepEngine(self.mesh, *how, self.root_device, plugin.mode.params, plugin.train_step_context)
        self._own_callbacks.add(self.engine.metric_watch())

    def process_dataloader(self, dataloader: object) -> object:
        """Compare loaders, give ranks that read the same samples the same order, and shield workers from signals."""
        self._start.compare_loader(dataloader)
        orders = self._ranks.layout.data_parallel_size == 1 and injects_samplers(self.lightning_module)
        dataloader = prepared(dataloader, self.root_device, self._ranks.dp_rank, orders=orders)
        self._own_callbacks.protect_workers(dataloader)
        if self._ranks.module.trainer.training:  # the user has made the loaders; their iterators come next
            self.checkpoints.randomness.go_on()
            dataloader = resumable(dataloader, self.checkpoints.randomness.go_on_reading)
        return dataloader

    # Setup: the model and its optimizers

    def setup(self, trainer: Trainer) -> None:
        """Place the model, and for training put it and the optimizers on flat buffers."""
        with self._record.during(Kind.SETUP):
            self._place()
            module = self._ranks.module
            self._start.compare_restoring(False)
            self.checkpoints.forget_shown()
            self._graphs = BlockGraphs(bool(self._job.compile), self.root_device)
            self._params.begin_evaluation(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                if self._layer_sync is not None and self.model is not None:
                    self.model = self._layer_sync.apply(self.model)
                warn_of_idle(module, self.mesh.layout, self._job.recompute)
                warn_of_slow(module, devices.kind_of(self.root_device), bool(self._job.compile))
                self.setup_optimizers(trainer)
                self.checkpoints.load_optimizers()
                self._op_report_is_due = True
            self.setup_precision_plugin()
            self.engine.watch(module)
            introduce(trainer, module, self.mesh)
            self._start.forecast.announce(type(self).__name__)
            self._terminal.open()

    def _place(self) -> None:
        """Make the model ready for the weights of a checkpoint, once in a run."""
        if self._start.place(self.boundary):
            self._params.hand_over(self.precision_plugin.mode)
            self.model = self.precision_plugin.convert_module(self._ranks.module)
            self.model_to_device()

    def model_to_device(self) -> None:
        """Move the model to this process's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers, then put flat main parameters into their groups."""
        self._start.compare_optimizers(partial(super().setup_optimizers, trainer))
        if self.mesh.is_distributed:
            decide_on_rank_0(self.lr_scheduler_configs, self.broadcast)
        self._params.put_on_buffers(trainer, self.precision_plugin, self.micro_batch_size)

    # Barriers and checkpoints

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. At the barrier ``"run-stage"`` Lightning has set its signal handlers: replace them."""
        self.checkpoints.writer.at_barrier(is_rank_zero=self.is_global_zero)
        self._ranks.barrier()
        if name == "run-stage":
            self._own_callbacks.listen()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model from a checkpoint or a Hugging Face directory; :meth:`setup` loads the state of optimizers."""
        self._place()
        with self._record.during(Kind.LOAD, str(checkpoint_path)):
            self._start.compare_restoring(True)
            checkpoint = self.checkpoints.load(checkpoint_path, weights_only)
        self._record.mark(Kind.LOAD)  # hooks that read it come next
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the entries of ``state_dict`` that a hook has changed; :meth:`load_checkpoint` has loaded the others."""
        self.checkpoints.load_edits(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore settings that hooks may have changed since :meth:`setup` loaded the optimizers."""
        self.checkpoints.go_on(checkpoint)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shard of the model."""
        self._params.finish_gather()
        return self._ranks.module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: :meth:`save_checkpoint` writes optimizer state straight to the files."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint; called by all ranks.

        With ``async_save``, while a fit is running, this returns as soon as the model is copied to the host. Optimizer
        state is copied during the next forward and backward, and the optimizer's step waits for the copy.

        Raises:
            CheckpointError: if this save has failed, or the one before, which was written in the background.
            RuntimeError: before the model is built, or the processes of the job have started.
            TypeError: for ``storage_options``, which no sharded strategy of Lightning takes.
        """
        self._record.require_peers(filepath)
        with self._record.during(Kind.SAVE, str(filepath)):
            if storage_options is not None:
                asked = "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg"
                raise TypeError(f"{asked} is not supported for `{type(self).__name__}`: it writes local directories")
            self.checkpoints.save(checkpoint, filepath, self.save_guard)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, on one rank, once the newer one is durable and no link leads to it.

        ``ModelCheckpoint`` changes its link to the newer one only after this call.
        """
        if self.is_global_zero:
            self.checkpoints.writer.remove(Path(filepath))

    # Training

    def on_train_start(self) -> None:
        """Refuse to train weights that are NaN or infinite, wherever they come from.

        Raises:
            NonFiniteError: on all ranks.
        """
        if self._job.check_for_nan_in_loss_and_grad and self._params.optimizers is not None:
            self._params.optimizers.check_params()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Resume random numbers in mid-epoch, finish background saves, and agree if a validation comes next."""
        self._ranks.trials.agree()
        self.checkpoints.randomness.begin_batch(batch_idx)
        self.checkpoints.writer.catch_up()
        trainer = self._ranks.module.trainer
        self._params.follow_trainer(trainer, self.precision_plugin, self.micro_batch_size)
        self._ranks.recorder.main.step = step = trainer.global_step
        warn_of_missed_saves(trainer, step)
        if (mesh := self.mesh).is_distributed:
            self._validated = agree_to_validate(trainer, self._validated)
        self._start.forecast.measure(type(self).__name__, step, self.engine.device, mesh.pp.rank)
        self._terminal.count(trainer, batch_idx)

    def watching_batches(self) -> AbstractContextManager[None]:
        """Bracket a training step, which all ranks take: a fault in the batch of any rank is raised at its end.

        Raises:
            DataError: on all ranks.
        """
        assert self._batches is not None
        return self._ranks.trials.part(self._batches.step(self.lightning_module))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Check a batch while it is on the host, then move it.

        Raises:
            DataError: for a fault that all ranks have seen.
        """
        if self._batches is not None:
            batch = self._batches.look(self.lightning_module, batch, dataloader_idx)
            device = device or self.engine.device
        with self._ranks.trials.part():
            return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a user's ``training_step``; with several micro-batches, forward and backward of them all.

        With one micro-batch this is stock Lightning: the loss keeps its graph and :meth:`backward` differentiates it.
        """
        with self._record.during(Kind.TRAINING_STEP):
            module, optimizers, engine = self._ranks.module, self._params.optimizers, self.engine
            assert optimizers is not None
            batch, *rest = [*args, *kwargs.values()]
            trainer, is_automatic = module.trainer, module.automatic_optimization
            batches = trainer.accumulate_grad_batches
            micro_batches = engine.split(batch, trainer) if is_automatic else None
            optimizers.begin_batch(trainer.fit_loop.batch_idx % batches == 0, micro_batches is not None)
            self._params.share_buffers(trainer)
            with self.watching_batches(), self._graphs.batch("training", batch):
                scale = self.precision_plugin.scale_of_loss() / (batches if is_automatic else 1)
                if micro_batches is None:
                    output = engine.plain_step(module, partial(module.training_step, *args, **kwargs), scale)
                else:
                    finishing = None if self._params.accumulates else optimizers
                    output = engine.train(module, micro_batches, tuple(rest), scale, finishing)
            if self._op_report_is_due:
                self._op_report_is_due = False
                write_op_report(module, self._ranks.ops, self.mesh)
            return optimizers.end_batch(output, batches)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, unless :meth:`training_step` has; the hooks are called in both cases."""
        with self._record.during(Kind.BACKWARD):
            module, optimizers = self._ranks.module, self._params.optimizers
            assert optimizers is not None
            trials = self._ranks.trials  # during which nothing is sent before all ranks have the memory for it
            if optimizers.backward_is_done:
                optimizers.show_grads()
                self.precision_plugin.pre_backward(closure_loss, module)
                return self.precision_plugin.post_backward(closure_loss, module)
            optimizers.begin_backward()
            with trials.part(optimizers.lightnings_backward(self._params.backward_is_last)):
                closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            self.engine.mark_step()
            trials.agree()
            return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Mark the batches inside as not the last of their optimizer step: Lightning accumulates gradients."""
        self._params.accumulates = True
        try:
            yield
        finally:
            self._params.accumulates = False

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One step of the user's optimizer."""
        with self._record.during(Kind.OPTIMIZER_STEP):
            with self._ranks.trials.step():
                result = super().optimizer_step(optimizer, closure, model, **kwargs)
            self.engine.mark_step()
            assert self._params.optimizers is not None
            is_last, is_skipped = self._ranks.module.trainer.is_last_batch, self.precision_plugin.step_is_skipped
            self._params.optimizers.step_is_over(optimizer, is_last, is_skipped)
            return result

    def on_train_end(self) -> None:
        """Wait for checks, parameter gathers and background saves, and complete the progress bar."""
        self._params.finish_finite_checks()
        self._params.finish_gather()
        self.checkpoints.finish()
        trainer = self._ranks.module.trainer
        self._terminal.count(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    # Evaluation

    def on_validation_start(self) -> None:
        """Give a validation that is repeated after resuming its first random numbers."""
        self.checkpoints.randomness.begin_validation(sanity_checking=self._ranks.module.trainer.sanity_checking)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``validation_step`` on every micro-batch. The first step broadcasts buffers as hooks left them."""
        return self._evaluate(Kind.VALIDATION_STEP, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``test_step`` on every micro-batch."""
        return self._evaluate(Kind.TEST_STEP, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``predict_step`` on every micro-batch, outputs joined."""
        return self._evaluate(Kind.PREDICT_STEP, *args, **kwargs)

    def _evaluate(self, kind: Kind, *args: Any, **kwargs: Any) -> Any:
        module, name = self._ranks.module, kind.name.lower()
        with self._record.during(kind):
            if kind is Kind.VALIDATION_STEP:
                self._params.share_buffers(module.trainer)
            self._params.finish_gather()
            batch, *rest = [*args, *kwargs.values()]
            micro_batches = self.engine.split(batch, module.trainer, *rest[1:])
            with self.precision_plugin.forward_context(), self._graphs.batch(name, batch, *rest):
                if micro_batches is None:
                    output = getattr(module, name)(*args, **kwargs)
                    self.engine.mark_step()
                    return output
                broadcast = kind is Kind.PREDICT_STEP and self._job.broadcast_predictions
                return self.engine.evaluate(module, name, micro_batches, tuple(rest), broadcast)

    def on_validation_end(self) -> None:
        """Raise the faults of batches on all ranks, and record that training waits for its next batch."""
        self.on_test_end()
        self.checkpoints.randomness.end_validation(sanity_checking=self._ranks.module.trainer.sanity_checking)
        self._record.mark(Kind.DATA)

    def on_test_end(self) -> None:
        """Raise the faults of batches, on all ranks."""
        with self.watching_batches():
            pass  # replicas may have different numbers of batches, and meet here

    on_predict_end = on_test_end

    # The end

    def note_error(self, error: BaseException) -> bool:
        """Record, before any hook, the error that ends this rank's run; True if all ranks can still save.

        An out-of-memory error gets the memory prediction and the cheapest remedies as a note.
        """
        if error is not self._record.error:
            self._start.forecast.explain(error)
        together = self._record.note_error(error)
        self._ranks.end.note_error(error, together)
        return together

    def on_exception(self, exception: BaseException) -> None:
        """Record the error, if the launcher has not done so."""
        self.note_error(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the run, and release the environment. Parameters stay in place, as views of flat buffers."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._terminal.close()
        with self._record.ending():
            self._known_warnings.close()
            self._own_callbacks.end()
            self._start.end_run()
            self.checkpoints.close()
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

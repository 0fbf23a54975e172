"""The third layer of the strategy: Lightning's hooks, in the order of a run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import device as devices
from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.lightning.build.placement import Placement, placement_of, store_placement
from lightning_megatron.lightning.comparison.facts import start_statement
from lightning_megatron.lightning.compat.accelerator import enable_gpu_migration_on
from lightning_megatron.lightning.monitoring.known_warnings import KnownWarnings
from lightning_megatron.lightning.monitoring.model_summary import introduce
from lightning_megatron.lightning.run_state.missed_saves import warn_of_missed_saves
from lightning_megatron.lightning.step.engine import StepEngine
from lightning_megatron.lightning.step.grad_reduction import micro_batches_of_step, reduce_dtype
from lightning_megatron.lightning.step.graphs import BlockGraphs
from lightning_megatron.lightning.step.op_report import write_op_report
from lightning_megatron.lightning.step.optimizers import OptimizerSet, decide_on_rank_0
from lightning_megatron.lightning.step.watchers import watches_parameters
from lightning_megatron.lightning.strategy.checkpoints import CheckpointStrategy
from lightning_megatron.lightning.strategy.comparison import StartComparison
from lightning_megatron.lightning.strategy.kill_switch import RunSwitches
from lightning_megatron.lightning.strategy.own_callbacks import OwnCallbacks
from lightning_megatron.lightning.strategy.recording import ActionRecord, recorded
from lightning_megatron.lightning.strategy.streams import StreamChecks
from lightning_megatron.lightning.validation.idle import warn_of_idle
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.lightning.validation.slow import warn_of_slow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.stage import StageBoundary


class RunStrategy(CheckpointStrategy):
    """Start, steps, evaluation and end of a run.

    Args:
        job: settings of the job.
        **parts: objects that any strategy of Lightning may be given.

    Attributes:
        micro_batch_size: samples of one forward; ``None`` for the whole batch.
        boundary: beginning and end of model calls on this rank's pipeline stages; ``None`` without a pipeline.
    """

    def __init__(self, job: JobSettings, **parts: Any) -> None:
        super().__init__(job, **parts)
        self.micro_batch_size = job.micro_batch_size
        self.boundary = StageBoundary(job.layout.pp * job.layout.vpp) if job.layout.pp > 1 else None
        self._record = ActionRecord(self, job.record_actions)
        self._comparison = StartComparison(self, job.may_differ or ())
        self._switches = RunSwitches(job.save_on_signal)
        self._streams, self._own_callbacks = StreamChecks(), OwnCallbacks()
        self._engine: StepEngine | None = None
        self._before: Placement | None = None
        self._accumulating = self._backward_is_done = self._op_report_is_due = False
        self._graphs = BlockGraphs()
        self._known_warnings = KnownWarnings()

    @property
    def engine(self) -> StepEngine:
        """The engine that runs the steps, from ``setup_environment`` on."""
        assert self._engine is not None
        return self._engine

    @contextmanager
    def during(self, kind: Kind, detail: str = "") -> Iterator[None]:
        """Bracket a phase in the record of this rank.

        Args:
            kind: kind of the phase.
            detail: subject of it, such as a path.
        """
        with self._record.during(kind, detail):
            yield

    # Start: ranks meet, compare what they were given, and make their process groups

    def _compare_ranks(self, trainer: Trainer | None, *objects: object) -> None:
        """Compare everything that is given before ranks talk; the layout, too, so over the store where they meet alone.

        Args:
            trainer: the Trainer.
            *objects: objects that it was handed.

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
            self._record.begin_run(store)
            given = self._job.arguments, self._job.layout, *ranks, self.lightning_module, objects
            self._comparison.begin(store, start_statement(*given), trainer, objects)

    def _begin_fit(self, trainer: Trainer, ckpt_path: Any) -> Any:
        """Look for the last checkpoint where one is asked for, before Lightning does; called by all ranks.

        Returns:
            The path to go on from, or what was given.

        Raises:
            CheckpointError: where there are checkpoints and none is good, or another run saves there.
        """
        if not self._folders.begin_fit(trainer, ckpt_path):
            return ckpt_path
        assert self.lightning_module is not None
        self.lightning_module.trainer = trainer  # Lightning's next step
        self._start_ranks()
        return self._folders.find_last(trainer, ckpt_path)

    def _meet(self) -> Store | None:
        return self._record.meet(super()._meet)

    def _create_mesh(self) -> ParallelMesh:
        return self._record.connect(super()._create_mesh)

    def _start_ranks(self) -> None:
        """Start the process groups, if they are not there."""
        if self._mesh is None:
            self._take_device()
            self._before = placement_of(self.lightning_module)
            self._take_place(self._before)
            self._connect_groups()
            self._agree_on_seed()
        self._draw_alike()

    def _take_place(self, before: Placement | None) -> None:
        """Make new groups; or keep those of the Trainer before, if its model was built for this layout."""
        if before is not None and before.can_reuse_mesh(self._job.layout.resolve(self.world_size), self.root_device):
            self._mesh, self.boundary = before.mesh, before.boundary
            self._register_end()
        else:
            self._mesh = self._create_mesh()

    def setup_environment(self) -> None:
        """Start the process groups; from here on :attr:`mesh` exists."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        self._saved, self._end.has_failed = {}, False
        self._streams.restart()
        self._own_callbacks.remove()  # left by a run that an error ended before its teardown
        super().setup_environment()
        if not self._comparison.has_begun:  # no launcher has done so
            self._compare_ranks(None)
        self._own_callbacks.add(trainer, *self._switches.open(trainer))
        if self._job.gpu_migration:
            enable_gpu_migration_on(self.root_device)
        self.check(self.lightning_module, getattr(trainer, "datamodule", None), trainer=trainer)
        self._start_ranks()
        self._known_warnings.open(one_replica=self.data_parallel_size == 1)
        own = self._record.begin(trainer) + self._streams.callbacks(self.mesh, self.collective_timeout)
        self._own_callbacks.add(trainer, *own)
        how = self.boundary, self._job.pipeline_schedule, self.micro_batch_size, self.root_device
        self._engine = StepEngine(self.mesh, *how, self.precision_plugin.mode.params)

    def process_dataloader(self, dataloader: object) -> object:
        """Compare loaders, give ranks that read the same samples one order of them, and protect workers."""
        if self._comparison.has_begun and self.lightning_module is not None:
            self._comparison.loader(dataloader, self.lightning_module.trainer)
        dataloader = super().process_dataloader(dataloader)
        self._switches.protect_workers(dataloader)
        return dataloader

    # Setup: the model and its optimizers

    @recorded(Kind.SETUP)
    def setup(self, trainer: Trainer) -> None:
        """Place the model, and for training put it and the optimizers on flat buffers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        store_placement(self.lightning_module, Placement(self.mesh, self.boundary), self._before)
        self.accelerator.setup(trainer)
        self._release_optimizers()
        self._open_saving(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self._graphs = BlockGraphs(bool(self._job.compile), self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            warn_of_idle(self.lightning_module, self.mesh.layout, self._job.recompute)
            warn_of_slow(self.lightning_module, devices.kind_of(self.root_device), bool(self._job.compile))
            self.setup_optimizers(trainer)
            self._op_report_is_due = True
        self.setup_precision_plugin()
        self.engine.watch(self.lightning_module)
        introduce(trainer, self.lightning_module, self.mesh)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers, then put flat main parameters into their groups."""
        super().setup_optimizers(trainer)
        self._comparison.optimizers(self.lightning_module)
        assert self.lightning_module is not None
        if self.mesh.is_distributed:
            decide_on_rank_0(self.lr_scheduler_configs, self.broadcast)
        mode, kind = self.precision_plugin.mode, devices.kind_of(self.root_device)
        summands = micro_batches_of_step(trainer, self.micro_batch_size), self.data_parallel_size
        watched = watches_parameters(trainer)
        config = replace(
            self._job.optimizer,
            main_dtype=mode.main,
            grad_dtype=mode.grads,
            reduce_dtype=reduce_dtype(self._job.grad_reduce_dtype, kind, mode.params, *summands),
            overlap_param_gather=self._job.optimizer.overlap_param_gather and not watched,
        )
        checks_nan = self._job.check_for_nan_in_loss_and_grad
        found = OptimizerSet(self.lightning_module, self.optimizers, self.mesh, config, checks_nan)
        self._optimizer_set = found
        self.precision_plugin.manage(self.sharded_optimizers, found.check_replicas, watched, found.finite_checks)

    # Barriers and checkpoints

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; Lightning's barriers also tell that it has restored, or has set its signal handlers."""
        self._comparison.barrier(name)
        self._writer.at_barrier(is_rank_zero=self.is_global_zero)
        super().barrier(name)
        if name == "run-stage":
            self._switches.listen()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint, as :class:`CheckpointStrategy` does, with a mark in the record of this rank."""
        with self.during(Kind.LOAD, str(checkpoint_path)):
            self._comparison.restoring()
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._record.mark(Kind.LOAD)  # hooks that look at it come next
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint, as :class:`CheckpointStrategy` does, with a mark in the record of this rank."""
        self._record.require_peers(filepath)
        with self.during(Kind.SAVE, str(filepath)):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    # Training

    def on_train_start(self) -> None:
        """Refuse to begin with weights that are NaN or infinite, of whatever origin.

        Raises:
            NonFiniteError: on all ranks.
        """
        if self._job.check_for_nan_in_loss_and_grad and self._optimizer_set is not None:
            self._optimizer_set.check_params()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Resume random numbers in mid-epoch, finish background saves, and agree if a validation comes next."""
        self._randomness.begin_batch(batch_idx, self.mesh)
        self._writer.catch_up()
        if self.lightning_module is not None:
            warn_of_missed_saves(self.lightning_module.trainer)
            self._streams.agree_to_validate(self.lightning_module.trainer, self.mesh)

    @contextmanager
    def watching_batches(self) -> Generator[None, None, None]:
        """Bracket a training step, which all ranks take: a fault in the batch of any rank is raised at its end.

        Raises:
            DataError: on all ranks.
        """
        with self._streams.step(self.lightning_module, self.mesh):
            yield

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Check a batch while it is on the host, then move it.

        Raises:
            DataError: for a fault that all ranks have seen.
        """
        batch = self._streams.look(self.lightning_module, batch, self.mesh, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    @recorded(Kind.TRAINING_STEP)
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a user's ``training_step``; with several micro-batches, forward and backward of them all.

        With one micro-batch this is stock Lightning: the loss keeps its graph and :meth:`backward` differentiates it.
        """
        module, optimizers = self.lightning_module, self._optimizer_set
        assert module is not None
        assert optimizers is not None
        batch, *rest = [*args, *kwargs.values()]
        batches = module.trainer.accumulate_grad_batches
        micro_batches = self.engine.split(batch) if module.automatic_optimization else None
        optimizers.begin_batch(module.trainer.fit_loop.batch_idx % batches == 0, micro_batches is not None)
        with self.precision_plugin.train_step_context(), self.watching_batches(), self._graphs.batch("training", batch):
            scale = self.precision_plugin.scale_of_loss() / (batches if module.automatic_optimization else 1)
            if micro_batches is None:
                output = self.engine.plain_step(partial(module.training_step, *args, **kwargs), scale)
                devices.mark_step(self.root_device)
            else:
                finishing = None if self._accumulating else optimizers
                output = self.engine.train(module, micro_batches, tuple(rest), scale, finishing)
        self._backward_is_done = micro_batches is not None
        if self._op_report_is_due:
            self._op_report_is_due = False
            write_op_report(module, self.ops, self.mesh)
        return optimizers.end_batch(output, batches, self._backward_is_done)

    @recorded(Kind.BACKWARD)
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate, unless the schedule has done so; hooks run in both cases."""
        assert self.lightning_module is not None
        assert self._optimizer_set is not None
        if self._backward_is_done:
            self._backward_is_done = False
            self._optimizer_set.show_grads()
            self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self._optimizer_set.begin_backward()
        # Under manual optimization the last backward of a step is not known: all gradients are sent at the step.
        last = self.lightning_module.automatic_optimization and not self._accumulating
        with self._optimizer_set.last_backward(last), self._optimizer_set.lightnings_backward():
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        devices.mark_step(self.root_device)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Mark the batches inside as not the last of their optimizer step: Lightning accumulates gradients."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @recorded(Kind.OPTIMIZER_STEP)
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One step of the user's optimizer."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        devices.mark_step(self.root_device)
        assert self._optimizer_set is not None
        assert self.lightning_module is not None
        is_last, is_refused = self.lightning_module.trainer.is_last_batch, self.precision_plugin.step_is_refused
        self._optimizer_set.step_is_over(optimizer, is_last, is_refused)
        return result

    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradient over the whole model, before clipping; equal on all ranks."""
        return self.precision_plugin.grad_norm()

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norm of every parameter's gradient over the whole model, by global name, equal on all ranks.

        For ``on_before_optimizer_step``, on all ranks; parameters without a gradient are left out.
        """
        return {} if self._optimizer_set is None else self._optimizer_set.grad_norms()

    def on_train_end(self) -> None:
        """Leave whole parameters behind, and durable checkpoints."""
        self._finish_finite_checks()
        self.finish_param_gather()
        self.finish_save()

    # Evaluation

    def on_validation_start(self) -> None:
        """Draw in a validation that starts again the random numbers that it drew before."""
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.sanity_checking:
            self._randomness.begin_validation(self.mesh)

    @recorded(Kind.VALIDATION_STEP)
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``validation_step`` on every micro-batch."""
        return self._evaluate("validation_step", *args, **kwargs)

    @recorded(Kind.TEST_STEP)
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``test_step`` on every micro-batch."""
        return self._evaluate("test_step", *args, **kwargs)

    @recorded(Kind.PREDICT_STEP)
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``predict_step`` on every micro-batch, outputs joined."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self.finish_param_gather()
        batch, *rest = [*args, *kwargs.values()]
        micro_batches = self.engine.split(batch)
        with self.precision_plugin.forward_context(), self._graphs.batch(name, batch, *rest):
            if micro_batches is None:
                output = getattr(module, name)(*args, **kwargs)
                devices.mark_step(self.root_device)
                return output
            broadcast = name == "predict_step" and self._job.broadcast_predictions
            return self.engine.evaluate(module, name, micro_batches, tuple(rest), broadcast)

    def on_validation_end(self) -> None:
        """Raise the faults of batches on all ranks; in the middle of an epoch, training then waits for a batch."""
        self._streams.end_evaluation(self.lightning_module, self.mesh)
        assert self.lightning_module is not None
        self._randomness.end_validation(self.mesh, sanity_checking=self.lightning_module.trainer.sanity_checking)
        self._record.mark(Kind.DATA)

    def on_test_end(self) -> None:
        """Raise the faults of batches, on all ranks."""
        self._streams.end_evaluation(self.lightning_module, self.mesh)

    on_predict_end = on_test_end

    # The end

    def note_error(self, error: BaseException) -> bool:
        """Write down, before any hook, the error that this rank's run ends in; True if all ranks can still save."""
        together = self._record.note_error(error)
        self._end.note_error(error, together)
        return together

    def on_exception(self, exception: BaseException) -> None:
        """Write the error down, if the launcher has not done so."""
        self.note_error(exception)

    def _end_run(self) -> None:
        with self._record.ending():
            self._known_warnings.close()
            self._switches.close()
            self._own_callbacks.remove()
            self._comparison.restart()
            self._end_saving()

    def teardown(self) -> None:
        """End the run, and release the environment. Parameters stay in place, as views of flat buffers."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._end_run()
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

"""Parameters that optimizers train: on flat buffers during a fit, whole between steps, their state in files."""

from __future__ import annotations

from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_megatron import device as devices
from lightning_megatron.lightning import checkpointing
from lightning_megatron.lightning.compat.skipped_hooks import skip
from lightning_megatron.lightning.run_state.buffers import BufferSync
from lightning_megatron.lightning.step.grad_reduction import accumulation_dtype, micro_batches_of_step, reduce_dtype
from lightning_megatron.lightning.step.optimizers import Holder, OptimizerSet
from lightning_megatron.lightning.step.precision import MegatronPrecision, PrecisionMode
from lightning_megatron.lightning.step.watchers import watches_gradients, watches_parameters
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.lightning.streams.evaluation import may_stay_away
from lightning_megatron.optim.buffers.kept_values import KeptModel, KeptValues
from lightning_megatron.optim.shown_main_values import ShownMainValues
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs

if TYPE_CHECKING:
    from lightning_megatron.checkpoint.optimizer_export.export import Collectors, HostMemory


class TrainedParameters:
    """Parameters and optimizers of a fit; without a fit there are none, and waits return at once.

    Attributes:
        optimizers: optimizers on flat buffers; ``None`` before a fit.
        buffers: broadcasts of the module's buffers; ``None`` before a fit.
        accumulates: True during a batch that is not the last of its optimizer step.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks, self._job = ranks, ranks.job
        self.optimizers: OptimizerSet | None = None
        self.buffers: BufferSync | None = None
        self._holder, self._is_further_fit, self.accumulates = Holder(), False, False
        self._narrow: torch.dtype | None = None  # dtype of parameters that hold their main values rounded

    @property
    def sharded(self) -> tuple[ShardedOptimizer, ...]:
        """The distributed optimizers, one for each of the user's."""
        return () if self.optimizers is None else tuple(self.optimizers.sharded)

    @property
    def are_shared(self) -> bool:
        """True if there are other ranks."""
        return self._ranks.mesh.is_distributed

    @property
    def backward_is_last(self) -> bool:
        """True if a backward now completes the gradients of an optimizer step, as far as known."""
        return not (self.accumulates or self._ranks.trials.is_on)

    # Setup and release

    def release(self) -> None:
        """Release flat buffers; before a new fit, also those of an earlier strategy that has trained the module.

        An evaluation of the module that this strategy has trained leaves them: a later save has optimizer state.
        """
        module = self._ranks.strategy.lightning_module
        if module is not None and not is_fitting(module) and vars(module).get("_megatron_holder") is self._holder:
            self.buffers = None
            return
        if module is not None and is_fitting(module):
            earlier = vars(module).get("_megatron_holder")
            self._is_further_fit = isinstance(earlier, Holder)
            earlier = earlier if isinstance(earlier, Holder) else Holder()
            if isinstance(params := earlier.owner, TrainedParameters):
                params._take_apart()
            self._holder = Holder(self, earlier.kept)
            module._megatron_holder = self._holder  # type: ignore[assignment] # on a module of any class
        self._take_apart()

    def hand_over(self, mode: PrecisionMode) -> None:
        """Before the cast to this precision, give an earlier fit's main values to this one.

        Tensors of fewer bits are cast back to those of this precision. Values that the cast will round are kept.
        """
        kept, module = self._holder.kept, self._ranks.module
        if kept is None and self._is_further_fit and mode.main is not None:
            wide = [(name, param) for name, param, _ in named_specs(module) if param.dtype == mode.main]
            values = (KeptValues(name, param, 0, param.detach().flatten()) for name, param in wide)
            self._holder.kept = KeptModel(mode.params, tuple(values))
        if kept is not None and torch.promote_types(kept.dtype, mode.params) == mode.params:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.dtype == kept.dtype:
                    tensor.data = tensor.data.to(mode.params)

    def end_run(self) -> None:
        """Wait for parameters, and leave main values that they hold rounded to the module's next fit."""
        self.finish_gather()
        if self._narrow is not None:
            values = (values for optimizer in self.sharded for values in optimizer.kept_values())
            self._holder.kept = KeptModel(self._narrow, tuple(values))

    def _take_apart(self) -> None:
        if self.optimizers is not None:
            self.optimizers.close()
        self.optimizers = self.buffers = self._narrow = None
        self._ranks.strategy.optimizers = []
        self._ranks.strategy.lr_scheduler_configs = []

    def put_on_buffers(self, trainer: Trainer, precision: MegatronPrecision, micro_batch_size: int | None) -> None:
        """Put main parameters into the groups of the user's optimizers, which the precision plugin will step."""
        strategy, mesh, job = self._ranks.strategy, self._ranks.mesh, self._job
        mode, kind = precision.mode, devices.kind_of(strategy.root_device)
        summands = micro_batches_of_step(trainer, micro_batch_size), mesh.layout.data_parallel_size
        watched = watches_parameters(trainer)
        config = replace(
            job.optimizer,
            main_dtype=mode.main,
            grad_dtype=accumulation_dtype(job.main_grads_dtype, mode.grads, *summands),
            reduce_dtype=reduce_dtype(job.grad_reduce_dtype, kind, mode.params, *summands),
            overlap_param_gather=job.optimizer.overlap_param_gather and not watched,
        )
        checks_nan = job.check_for_nan_in_loss_and_grad
        kept, self._holder.kept = self._holder.kept, None
        kept = None if kept is None else kept.valid()
        stages = self._ranks.gather_stages()
        found = OptimizerSet(self._ranks.module, strategy.optimizers, mesh, config, stages, checks_nan)
        self.optimizers, self.buffers = found, BufferSync(self._ranks.module, mesh)
        self.buffers.share(from_stage=0)
        if kept is not None:
            for optimizer in found.sharded:
                optimizer.take_kept(kept)
                optimizer.refresh_params()
        self._narrow = None if mode.main is None else mode.params
        check = found.check_replicas if mesh.tp.size > 1 else None
        precision.manage(self.sharded, check, watched, found.finite_checks)

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Outside of a fit, make buffers equal on all ranks: a fit before has left each rank those of its last step."""
        if trainer.state.fn != TrainerFn.FITTING:
            mesh = self._ranks.mesh
            BufferSync(self._ranks.module, mesh).share(from_stage=mesh.pp.size - 1)

    def follow_trainer(self, trainer: Trainer, precision: MegatronPrecision, micro_batch_size: int | None) -> None:
        """Put the model on the buffers of optimizers that were assigned to ``trainer.optimizers`` during the run."""
        assert self.optimizers is not None
        given = self._ranks.strategy.optimizers
        if len(given) == len(self.optimizers.given) and all(map(is_, given, self.optimizers.given)):
            return
        self.end_run()
        self.optimizers.close()
        self.put_on_buffers(trainer, precision, micro_batch_size)

    # Values between steps

    def share_buffers(self, trainer: Trainer) -> None:
        """Broadcast buffers before a batch of training or a validation, see :class:`BufferSync`."""
        if self.buffers is None or not self.buffers.are_sent:
            return
        if trainer.training or not may_stay_away(trainer, self._ranks.layout):
            self.buffers.begin(sends_gradients=trainer.training and not self.accumulates)

    def finish_gather(self) -> None:
        """Wait until all parameters have the values of the last step."""
        if self.optimizers is not None:
            self.optimizers.finish_param_gather()

    def finish_finite_checks(self) -> None:
        """Raise the errors that the checks of the last steps have found."""
        if self.optimizers is not None:
            self.optimizers.finish_finite_checks()

    def settle(self) -> None:
        """Make parameters and main values equal, also where weights were written between steps."""
        self.finish_gather()
        for optimizer in self.sharded:
            optimizer.copy_written_values()

    def refresh_main(self) -> None:
        """Copy all parameters to their main values."""
        for optimizer in self.sharded:
            optimizer.refresh_main()

    def main_state_dict(self, module: LightningModule) -> dict[str, Any]:
        """The ``state_dict`` of a module with main values in the place of parameters, on the host."""
        self.settle()
        mains: dict[int, Tensor] = {}
        for optimizer in self.sharded:
            mains |= optimizer.main_values()
        state = module.state_dict(keep_vars=True)
        return {name: mains[id(value)] if id(value) in mains else _on_host(value) for name, value in state.items()}

    # Files of optimizer state

    def export(self, path: str | Path, level: str, ranks_per_node: int | None) -> HostMemory:
        """Write the state of all optimizers to one file."""
        through = self._collectors(level, ranks_per_node)
        self.settle()
        return checkpointing.export_optimizers(path, self.sharded, through, sharded=self._job.optimizer.shard)

    def load(self, path: str | Path, level: str, ranks_per_node: int | None) -> HostMemory:
        """Load the optimizers from a file of :meth:`export`."""
        through = self._collectors(level, ranks_per_node)
        return checkpointing.import_optimizers(path, self.sharded, through, sharded=self._job.optimizer.shard)

    def _collectors(self, level: str, ranks_per_node: int | None) -> Collectors:
        if not self.sharded:
            raise RuntimeError("there are optimizers only while fit runs: call this in a hook such as on_train_start")
        from lightning_megatron.checkpoint.optimizer_export.export import Collectors

        world_size, num_nodes = self._ranks.strategy.world_size, self._ranks.num_nodes
        return Collectors(self._ranks.mesh, level, ranks_per_node or max(1, world_size // num_nodes))


class HookGradients(Callback):
    """Completes the reduction of gradients before other hooks run, so that none edits what is being sent.

    ``MegatronStrategy`` adds this before the user's callbacks. Where optimizer state is sharded, the shares of the mean
    are gathered for hooks that may read gradients; without such a hook nothing is gathered.
    """

    reads_parameters = False

    def __init__(self, params: TrainedParameters) -> None:
        self._params = params
        self._after_backward = self._before_step = False

    def __deepcopy__(self, memo: dict[int, Any]) -> HookGradients:
        return HookGradients(self._params)  # copies share the strategy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look which hooks there are."""
        self._after_backward = watches_gradients(trainer, "on_after_backward")
        self._before_step = watches_gradients(trainer, "on_before_optimizer_step", "configure_gradient_clipping")
        if not self._before_step:
            skip(self, "on_before_optimizer_step")
        # Without other ranks and readers, the gradients are completed right before the step.
        if not (self._params.are_shared or self._after_backward or is_overridden("optimizer_step", pl_module)):
            skip(self, "on_after_backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Complete the gradients; under manual optimization only for a hook, as the last backward is not known."""
        if self._params.backward_is_last and self._params.optimizers is not None:
            self._params.optimizers.average_others()
        if self._params.backward_is_last and (pl_module.automatic_optimization or self._after_backward):
            self._complete(shown=self._after_backward)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Show gradients to hooks, and to the module's own clipping: unscaled ones, and the others' sums so far."""
        if self._before_step:
            self._complete(shown=True)

    def _complete(self, shown: bool) -> None:
        for sharded in self._params.sharded:
            if not sharded.grads_are_complete:
                sharded.finish_grad_sync()
            if shown:
                sharded.show_mean_grads()


class BeforeAverages(Callback):
    """Stands before a callback that averages parameters or validates with averages: it gets main values."""

    reads_parameters = False

    def __init__(self, params: TrainedParameters, shown: ShownMainValues) -> None:
        self._params, self._shown = params, shown

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeAverages:
        return BeforeAverages(self._params, self._shown)  # copies share the strategy

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the copy of the model, which holds the averages, have the dtype of main values."""
        mode = MegatronPrecision.of(trainer.precision_plugin).mode
        if stage == "fit" and mode.main is not None:
            if is_overridden("configure_model", pl_module):
                pl_module.configure_model()  # as the callback does next
            self._shown.widen(pl_module.parameters(), mode.params, mode.main)

    def _show(self, *_: Any, **__: Any) -> None:
        self._shown.show(self._params.sharded)

    on_train_batch_end = on_train_epoch_start = on_train_epoch_end = on_train_end = _show
    on_validation_epoch_start = on_validation_epoch_end = _show


class AfterAverages(Callback):
    """Stands behind that callback, so that others find parameters as they are."""

    reads_parameters = False

    def __init__(self, shown: ShownMainValues) -> None:
        self._shown = shown

    def __deepcopy__(self, memo: dict[int, Any]) -> AfterAverages:
        return AfterAverages(self._shown)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the model its dtypes back."""
        self._shown.narrow()

    def _take_back(self, *_: Any, **__: Any) -> None:
        self._shown.take_back()

    on_train_batch_end = on_train_epoch_start = on_train_epoch_end = on_train_end = _take_back
    on_validation_epoch_start = on_validation_epoch_end = _take_back

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no parameter with main values."""
        self._shown.hide()


def is_fitting(module: LightningModule) -> bool:
    """True if training continues after a save; if not, the caller may copy the files next, or exit."""
    try:
        state = module.trainer.state
    except RuntimeError:  # a module without a Trainer
        return False
    return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value

"""The strategy: Lightning's contract, and nothing that another room can do."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import device as devices
from lightning_megatron.arguments import checked
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.accelerator import be_taken_with, migrate_words, missed_accelerator
from lightning_megatron.lightning.comparison import ComparedStrategy
from lightning_megatron.lightning.launcher import LaunchCalls, launcher_of
from lightning_megatron.lightning.monitoring.model_summary import introduce
from lightning_megatron.lightning.placement import Placement, placement_of, settle
from lightning_megatron.lightning.precision import MegatronPrecision
from lightning_megatron.lightning.step.engine import StepEngine
from lightning_megatron.lightning.step.grad_reduction import GradReduceDtype, micro_batches_of_step, reduce_dtype
from lightning_megatron.lightning.step.op_report import write_op_report
from lightning_megatron.lightning.step.optimizers import OptimizerSet
from lightning_megatron.lightning.step.watchers import watches_parameters
from lightning_megatron.lightning.strategy.batches import BatchStrategy
from lightning_megatron.lightning.strategy.evaluation import EvaluatingStrategy
from lightning_megatron.lightning.strategy.recording import recorded
from lightning_megatron.lightning.strategy.rewind import RewindStrategy
from lightning_megatron.lightning.validation.features import compile_problems, plugin_problems
from lightning_megatron.lightning.validation.idle import warn_of_idle
from lightning_megatron.lightning.validation.job import ELSEWHERE, RULES, backend_problems, job_problems
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.ops.registry import Ops
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.pipeline.schedule import schedule_problems
from lightning_megatron.recompute import RecomputeMethod, RecomputePlan, recompute_problems
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.stage import StageBoundary, StageLayers

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
CPCommType = Literal["p2p", "all_gather", "a2a"]


class MegatronStrategy(EvaluatingStrategy, RewindStrategy, BatchStrategy, ComparedStrategy):
    """Megatron's parallelism for ``Trainer(strategy=MegatronStrategy(tp=8))``.

    One batch of the DataLoader is what one data-parallel replica trains on in one step; it is cut into micro-batches of
    ``micro_batch_size``, whose gradients are accumulated. So ``global batch = batch_size x dp x
    accumulate_grad_batches``, and every Trainer argument that counts batches means what Lightning's documentation says.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        cp: context-parallel ranks, which share every sequence.
        ep: expert-parallel ranks.
        etp: ranks that share one expert; ``None`` means ``tp``.
        vpp: model chunks of a pipeline rank.
        sequence_parallel: shard norms and dropout over the sequence inside tp; ``None`` means where ``tp > 1``.
        micro_batch_size: samples of one forward; ``None`` means the whole batch.
        pipeline_schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``; ``None`` means 1F1B,
            interleaved where ``vpp > 1``.
        cp_comm_type: how context-parallel ranks attend: ``"p2p"`` (a ring), ``"all_gather"`` or ``"a2a"`` (heads).
        first_stage_layers: layers of the first stage; ``None`` for an even share.
        last_stage_layers: layers of the last stage; ``None`` for an even share.
        count_embedding: let the embedding take the place of one layer when layers are shared out.
        count_loss: the same for the output layer and the loss.
        pipeline_layout: every stage spelled out in Megatron's letters, e.g. ``"Et*3|t*4|t*4L"``.
        broadcast_predictions: give ``predict_step``'s output to all pipeline stages, not only to the last.
        distributed_optimizer: shard main parameters and optimizer state over data-parallel ranks (ZeRO stage 1).
        elementwise_optimizers: optimizers whose update of an element looks at that element alone, beside those that
            are known: classes, import paths or bare names. Others run where each rank holds whole parameters.
        overlap_grad_reduce: send gradients while backward is running.
        overlap_param_gather: gather parameters while the next forward is running; off by itself where a callback or
            module looks at parameters between steps.
        grad_reduce_dtype: ``"fp32"`` or ``"bf16"`` on the wire; ``None`` for fp32; on Gaudi bf16 while
            a gradient is a sum over at most 256 micro-batches of all replicas (Intel's rule).
        bucket_size: gradient elements sent at once; ``None`` for Megatron's ``max(40e6, 1e6 x dp)``.
        recompute: what is computed again for its gradients instead of being kept: ``"selective"`` (core attention),
            ``"full"`` (layers), ``"moe"`` (experts), or some of ``"core_attn"``, ``"attention"``, ``"mlp"``, ``"moe"``.
        recompute_method: of ``"full"``: ``"uniform"`` (groups of layers) or ``"block"`` (some layers of each stage).
        recompute_num_layers: of ``"full"``: layers of a group, or layers of each stage.
        recompute_shard_saved: of ``"full"``: tp ranks share what is kept; for runs without sequence parallelism.
        compile: run every block of layers through ``torch.compile``: ``True`` for the device's own backend, or a name.
        gpu_migration: on Gaudi, run modules written for NVIDIA's devices as they are, by Intel's toolkit; no effect
            elsewhere.
        ops: how each op with versions of its own for devices is chosen, e.g. ``{"attention": "off"}`` or
            ``"attention=off,rms_norm=require"``: ``"auto"`` (the best there is), ``"require"`` (a kernel of the
            device's own, or an error), ``"off"`` (the reference in plain torch), or a variant such as attention's
            ``"fast_softmax"``. ``lightning-megatron ops`` lists them.
        fp8: which linear layers ``ops={"linear_fp8": ...}`` is about, and how they are scaled.
        check_for_nan_in_loss_and_grad: end the run where a loss, gradient or parameter is NaN or infinite, naming it
            and its rank, and neither save nor load such a model. ``SpikeGuard`` skips such steps instead.
        verify_on_load: compare the content of all files of a checkpoint with its manifest before anything is taken from
            it; ranks share the reading. ``False`` compares lengths.
        async_save: while ``fit`` is running, write checkpoints in the background, from a copy in host memory.
        save_on_signal: end ``fit`` on SIGTERM, SIGUSR1 and Ctrl-C after a step, saved, as ``KillSwitch`` does.
        record_actions: keep each rank's last actions in ``default_root_dir/.actions`` for ``lightning-megatron why``,
            until all end well.
        process_group_backend: ``None`` for the device's own: nccl, hccl, gloo.
        timeout: after which a collective that nobody answers fails.
        may_differ: what ranks may be given differently nevertheless, by the names that the error says, e.g.
            ``["code.*"]``; ``["*"]`` for anything.
        accelerator, parallel_devices, cluster_environment: as in Lightning's strategies.
        checkpoint_io: refused; checkpoints are sharded directories, written by all ranks.
        precision_plugin: a ``MegatronPrecision``, or leave it to ``Trainer(precision=...)``.

    Attributes:
        micro_batch_size: as given.
        boundary: where model calls begin and end on this rank's pipeline stages; ``None`` without a pipeline.
        num_nodes: set by the Trainer.
        recompute: what models compute again.
        op_modes: as given.

    Raises:
        ConfigError: for sizes that cannot work; what depends on the number of devices, the model or the data is checked
            before any process is started.
    """

    strategy_name = "megatron"

    @checked(ELSEWHERE, **RULES)
    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vpp: int = 1,
        sequence_parallel: bool | None = None,
        micro_batch_size: int | None = None,
        pipeline_schedule: PipelineSchedule | None = None,
        cp_comm_type: CPCommType = "p2p",
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
        count_embedding: bool = False,
        count_loss: bool = False,
        pipeline_layout: str | None = None,
        broadcast_predictions: bool = True,
        distributed_optimizer: bool = True,
        elementwise_optimizers: list[str | type[Optimizer]] | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        grad_reduce_dtype: GradReduceDtype | None = None,
        bucket_size: int | None = None,
        recompute: str | list[str] | None = None,
        recompute_method: RecomputeMethod = "uniform",
        recompute_num_layers: int = 1,
        recompute_shard_saved: bool = False,
        compile: bool | str = False,
        gpu_migration: bool = False,
        ops: dict[str, str] | str | None = None,
        fp8: Fp8Recipe | None = None,
        check_for_nan_in_loss_and_grad: bool = True,
        verify_on_load: bool = True,
        async_save: bool = False,
        save_on_signal: bool = True,
        record_actions: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        may_differ: list[str] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.settings = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        layout = ParallelLayout(
            tp, pp, cp, ep, etp, vpp=vpp, sequence_parallel=sequence_parallel, cp_comm_type=cp_comm_type
        )
        stock = accelerator, parallel_devices, cluster_environment, precision_plugin
        super().__init__(layout, process_group_backend, timeout, *stock)
        self.micro_batch_size = micro_batch_size
        self.boundary = StageBoundary(pp * vpp) if pp > 1 else None
        self._schedule = pipeline_schedule
        self._split = LayerSplit(first_stage_layers, last_stage_layers, count_embedding, count_loss, pipeline_layout)
        self._broadcast_predictions = broadcast_predictions
        self._distributed_optimizer = distributed_optimizer
        self._elementwise = tuple(elementwise_optimizers or ())
        self._verify_on_load, self._async_save = verify_on_load, async_save
        self._check_for_nan = check_for_nan_in_loss_and_grad
        self._record_actions = record_actions
        self._save_on_signal, self._may_differ = save_on_signal, tuple(may_differ or ())
        self._overlap_grad_reduce = overlap_grad_reduce
        self._overlap_param_gather = overlap_param_gather
        self._grad_reduce_dtype = grad_reduce_dtype
        self._bucket_size = bucket_size
        self._compile = compile
        self._gpu_migration = gpu_migration
        self._before: Placement | None = None
        self._accumulating = False
        self._backward_is_done = False
        wish = recompute, recompute_method, recompute_num_layers, recompute_shard_saved
        self.op_modes, self._fp8 = ops, fp8 or Fp8Recipe()
        raise_if_any(schedule_problems(pipeline_schedule, pp, vpp, 1) + recompute_problems(*wish, layout))
        self.recompute = RecomputePlan(*wish)
        self._op_report_is_due = False

    @property
    def ops(self) -> Ops:
        """What the arithmetic of models is chosen from, on the devices of the Trainer."""
        assert self.parallel_devices is not None
        return Ops(self.parallel_devices[0].type, self.op_modes, self._fp8)

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """Always a :class:`MegatronPrecision`: whatever Lightning assigns is translated."""
        # Lightning's own attribute: its connector looks there for a plugin that came with the strategy.
        return MegatronPrecision.of(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else MegatronPrecision.of(precision_plugin)

    # Starting

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        be_taken_with(self.accelerator, type(self))
        raise_if_any(self._environment_problems())
        calls = LaunchCalls(self.check, self.note_error, self._begin_fit, self._compare_ranks)
        job = self.cluster_environment, self.num_processes, self.num_nodes
        self._launcher = launcher_of(*job, self.root_device, calls)

    def _environment_problems(self) -> list[Problem]:
        assert self.parallel_devices is not None
        found = self._wished_layout.problems(world_size=self.num_nodes * self.num_processes)
        device = self.parallel_devices[0]
        found += plugin_problems(self.checkpoint_io, self._layer_sync, self._wished_layout, device)
        found += self.ops.problems() + backend_problems(self._backend, device) + missed_accelerator(device)
        return found + self.precision_plugin.problems(devices.kind_of(device), self._wished_layout)

    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Check everything that is known before training against the layout.

        Args:
            *objects: what the user hands to the Trainer: module, loaders, data module, path of a checkpoint.
            trainer: the Trainer, whose callbacks are looked at.

        Raises:
            ConfigError: with every fault found.
        """
        found = self._environment_problems()
        layout = self._wished_layout if found else self._wished_layout.resolve(self.num_nodes * self.num_processes)
        if self._compile:
            found += compile_problems(objects, self.root_device, self.compile_backend)
        given = layout, self._split, self.recompute, self.ops, self.micro_batch_size, self.precision_plugin.mode.params
        raise_if_any(found + job_problems(objects, trainer, *given))

    @property
    def compile_backend(self) -> str | None:
        """What blocks are compiled with; ``None`` for no compilation."""
        own = devices.compile_backend(self.root_device) if self._compile else None
        return self._compile if isinstance(self._compile, str) else own

    def stages(self, num_layers: int) -> list[StageLayers] | None:
        """What this rank's stages build of a model of ``num_layers`` layers; ``None`` without a pipeline."""
        if self.boundary is None:
            return None
        stages = self._split.stages(num_layers, self.layout.pp, self.layout.vpp)
        return [stage for stage in stages if stage.rank == self.mesh.pp.rank]

    def setup_environment(self) -> None:
        """Start the process groups; from here on :attr:`mesh` exists."""
        super().setup_environment()
        if self._gpu_migration:
            migrate_words(self.root_device)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        self.check(self.lightning_module, getattr(trainer, "datamodule", None), trainer=trainer)
        self._start_ranks()
        self._begin_record(trainer)
        size, dtype = self.micro_batch_size, self.precision_plugin.mode.params
        self._engine = StepEngine(self.mesh, self.boundary, self._schedule, size, self.root_device, dtype)
        self._watch_streams(trainer)

    def _start_ranks(self) -> None:
        """Start the process groups, if they are not there."""
        if self._mesh is None:
            self._take_device()
            self._before = placement_of(self.lightning_module)
            self._take_place(self._before)
            self._agree_on_seed()

    def _take_place(self, before: Placement | None) -> None:
        """Stand on new groups; or on those of the Trainer before, if what it left behind was built for this layout."""
        if before is not None and before.suits(self._wished_layout.resolve(self.world_size), self.root_device):
            self._mesh, self.boundary = before.mesh, before.boundary
        else:
            self._mesh = self._create_mesh()

    @recorded(Kind.SETUP)
    def setup(self, trainer: Trainer) -> None:
        """Place the model, and for training put it and the optimizers on flat buffers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        settle(self.lightning_module, Placement(self.mesh, self.boundary), self._before)
        self.accelerator.setup(trainer)
        self._release_optimizers()
        self._open_saving(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            warn_of_idle(self.lightning_module, self.mesh.layout, self.recompute)
            self.setup_optimizers(trainer)
            self._op_report_is_due = True
        self.setup_precision_plugin()
        self.engine.watch(self.lightning_module)
        introduce(trainer, self.lightning_module, self.mesh)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers, then put flat main parameters into their groups."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        mode, kind = self.precision_plugin.mode, devices.kind_of(self.root_device)
        summands = micro_batches_of_step(trainer, self.micro_batch_size), self.data_parallel_size
        watched = watches_parameters(trainer)
        self._optimizer_set = OptimizerSet(
            self.lightning_module,
            self.optimizers,
            self.mesh,
            mode,
            shard=self._distributed_optimizer,
            reduce_dtype=reduce_dtype(self._grad_reduce_dtype, kind, mode.params, *summands),
            overlap_grad_reduce=self._overlap_grad_reduce,
            overlap_param_gather=self._overlap_param_gather and not watched,
            bucket_size=self._bucket_size,
            elementwise=self._elementwise,
            check_finite=self._check_for_nan,
        )
        found = self._optimizer_set
        self.precision_plugin.manage(self.sharded_optimizers, found.check_replicas, watched, found.finite_checks)

    # Steps

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
        with self.precision_plugin.train_step_context(), self.watching_batches():
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
        """Differentiate, unless the schedule has done so; the hooks fire either way."""
        assert self.lightning_module is not None
        assert self._optimizer_set is not None
        if self._backward_is_done:
            self._backward_is_done = False
            self._optimizer_set.show_grads()
            self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self._optimizer_set.begin_backward()
        # Under manual optimization nobody says which backward is the last one: then all is sent at the step.
        last = self.lightning_module.automatic_optimization and not self._accumulating
        with self._optimizer_set.last_backward(last):
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        devices.mark_step(self.root_device)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning accumulates: gradients inside are not the last of their step."""
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

    def teardown(self) -> None:
        """Let go of the environment. Parameters stay where they are: they are views of flat buffers."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._end_run()
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


MegatronHPUStrategy = MegatronStrategy

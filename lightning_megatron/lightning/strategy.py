"""The strategy: Lightning's contract, and nothing that another room can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities import rank_zero_only as pl_rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron import device as devices
from lightning_megatron.comm.objects import broadcast_object
from lightning_megatron.config import (
    BatchShape,
    ConfigError,
    HasBatchShape,
    HasModelShape,
    ParallelLayout,
    Problem,
    nearest_names,
    raise_if_any,
)
from lightning_megatron.lightning.checkpoints import (
    continue_randomness,
    load_trainer_checkpoint,
    remove_checkpoint,
    save_trainer_checkpoint,
)
from lightning_megatron.lightning.launcher import CheckedLauncher
from lightning_megatron.lightning.loaders import share_randomness
from lightning_megatron.lightning.logs import LogSharing
from lightning_megatron.lightning.metrics import MetricSharing
from lightning_megatron.lightning.micro_batches import split_batch
from lightning_megatron.lightning.precision import MegatronPrecision
from lightning_megatron.lightning.refusals import callback_problems, module_problems, plugin_problems
from lightning_megatron.lightning.steps import EvaluationWork, TrainingWork
from lightning_megatron.lightning.watchers import watches_parameters
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.scaler import grad_reduce_dtype_rule
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import named_specs
from lightning_megatron.pipeline.boundary import StageBoundary
from lightning_megatron.pipeline.partition import StageLayers, partition
from lightning_megatron.pipeline.runtime import PipelineRuntime, evaluation_plan, training_plan
from lightning_megatron.pipeline.schedule import schedule_problems
from lightning_megatron.pipeline.tied import sum_tied_gradients

GradReduceDtype = Literal["fp32", "bf16"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
_REDUCE_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MegatronStrategy(ParallelStrategy):
    """Megatron's parallelism for ``Trainer(strategy=MegatronStrategy(tp=8))``.

    One batch of the DataLoader is what one data-parallel replica trains on in one step; it is cut into micro-batches of
    ``micro_batch_size``, whose gradients are accumulated. So ``global batch = batch_size x dp x
    accumulate_grad_batches``, and every Trainer argument that counts batches means what Lightning's documentation says.

    Args:
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        etp: ranks that share one expert; ``None`` means ``tp``.
        vpp: model chunks of a pipeline rank.
        sequence_parallel: shard norms and dropout over the sequence inside tp; ``None`` means where ``tp > 1``.
        micro_batch_size: samples of one forward; ``None`` means the whole batch.
        pipeline_schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``; ``None`` means 1F1B,
            interleaved where ``vpp > 1``.
        first_stage_layers: layers of the first stage; ``None`` for an even share.
        last_stage_layers: layers of the last stage; ``None`` for an even share.
        count_embedding: let the embedding take the place of one layer when layers are shared out.
        count_loss: the same for the output layer and the loss.
        pipeline_layout: every stage spelled out in Megatron's letters, e.g. ``"Et*3|t*4|t*4L"``.
        broadcast_predictions: give ``predict_step``'s output to all pipeline stages; else only the last one has it.
        distributed_optimizer: shard main parameters and optimizer state over data-parallel ranks (ZeRO stage 1).
        overlap_grad_reduce: send gradients while backward is running.
        overlap_param_gather: gather parameters while the next forward is running; off by itself where a callback or
            module looks at parameters between steps.
        grad_reduce_dtype: ``"fp32"`` or ``"bf16"`` on the wire; ``None`` for fp32, on Gaudi Intel's rule (bf16 up to
            256 accumulated micro-batches x dp).
        bucket_size: gradient elements sent at once; ``None`` for Megatron's ``max(40e6, 1e6 x dp)``.
        process_group_backend: ``None`` for the device's own: nccl, hccl, gloo.
        timeout: after which a collective that nobody answers fails.
        accelerator: as in Lightning's strategies.
        parallel_devices: as in Lightning's strategies.
        cluster_environment: as in Lightning's strategies.
        checkpoint_io: refused; checkpoints are sharded directories, written by all ranks.
        precision_plugin: a ``MegatronPrecision``, or leave it to ``Trainer(precision=...)``.

    Attributes:
        micro_batch_size: as given.
        boundary: where model calls begin and end on this rank's pipeline stages; ``None`` without a pipeline.
        num_nodes: set by the Trainer.

    Raises:
        ConfigError: for sizes that cannot work; what depends on the number of devices, the model or the data is checked
            before any process is started.
    """

    strategy_name = "megatron"

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
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
        count_embedding: bool = False,
        count_loss: bool = False,
        pipeline_layout: str | None = None,
        broadcast_predictions: bool = True,
        distributed_optimizer: bool = True,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        grad_reduce_dtype: GradReduceDtype | None = None,
        bucket_size: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, None, precision_plugin)
        self._wished_layout = ParallelLayout(tp, pp, cp, ep, etp, vpp=vpp, sequence_parallel=sequence_parallel)
        self.micro_batch_size = micro_batch_size
        self.num_nodes = 1
        self.boundary = StageBoundary(pp * vpp) if pp > 1 else None
        self._schedule = pipeline_schedule
        self._split = {
            "first_stage_layers": first_stage_layers,
            "last_stage_layers": last_stage_layers,
            "count_embedding": count_embedding,
            "count_loss": count_loss,
            "layout": pipeline_layout,
        }
        self._broadcast_predictions = broadcast_predictions
        self._distributed_optimizer = distributed_optimizer
        self._overlap_grad_reduce = overlap_grad_reduce
        self._overlap_param_gather = overlap_param_gather
        self._grad_reduce_dtype = grad_reduce_dtype
        self._bucket_size = bucket_size
        self._backend = process_group_backend
        self._timeout = timeout
        self._mesh: ParallelMesh | None = None
        self._seed = 0
        self._logs: LogSharing | None = None
        self._tied: tuple[str, ...] = ()
        self._sharded: list[ShardedOptimizer] = []
        self._open_windows: set[ShardedOptimizer] = set()
        self._accumulating = False
        self._backward_is_done = False
        self._saved_randomness: dict[str, Any] | None = None
        raise_if_any(self._argument_problems(checkpoint_io))

    def _argument_problems(self, checkpoint_io: CheckpointIO | None) -> list[Problem]:
        found = []
        layout = self._wished_layout
        for name, size in {"cp": layout.cp, "ep": layout.ep}.items():
            if size > 1:
                found.append(Problem(name, size, "not in this release", (1,)))
        found += schedule_problems(self._schedule, layout.pp, layout.vpp, 1)
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            found.append(Problem("micro_batch_size", self.micro_batch_size, "holds at least one sample", (1, None)))
        if self._bucket_size is not None and self._bucket_size < 1:
            found.append(Problem("bucket_size", self._bucket_size, "holds at least one element", (1, None)))
        if self._grad_reduce_dtype not in (None, *_REDUCE_DTYPES):
            near = nearest_names(str(self._grad_reduce_dtype), list(_REDUCE_DTYPES))
            found.append(Problem("grad_reduce_dtype", self._grad_reduce_dtype, "unknown", near))
        if checkpoint_io is not None:
            reason = "checkpoints are sharded directories that all ranks write together: leave it out"
            found.append(Problem("checkpoint_io", type(checkpoint_io).__name__, reason, (None,)))
        return found

    # Where we are

    @property
    def mesh(self) -> ParallelMesh:
        """This rank's groups; there once the Trainer has set up its environment.

        Raises:
            RuntimeError: before that.
        """
        if self._mesh is None:
            raise RuntimeError("the mesh exists from `configure_model` on, once the Trainer has started its processes")
        return self._mesh

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the Trainer's number of devices."""
        return self._wished_layout.resolve(self.world_size) if self._mesh is None else self._mesh.layout

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the data this rank reads."""
        return self.mesh.dp.rank

    @property
    def data_parallel_size(self) -> int:
        """Number of shares of the data."""
        return self.layout.data_parallel_size

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Always: Lightning injects a data-parallel sampler only into strategies that say so."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that differ only in tp, pp or cp read the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """Always a :class:`MegatronPrecision`: whatever Lightning assigns is translated."""
        # Lightning's own attribute: its connector looks there for a plugin that came with the strategy.
        return MegatronPrecision.of(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else MegatronPrecision.of(precision_plugin)

    # Starting

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers who we are."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = pl_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        raise_if_any(self._environment_problems())
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = CheckedLauncher(self.cluster_environment, self.num_processes, self.num_nodes, self.check)

    def _environment_problems(self) -> list[Problem]:
        world_size = self.num_nodes * self.num_processes
        assert self.parallel_devices is not None
        found = self._wished_layout.problems(world_size=world_size)
        found += plugin_problems(self.checkpoint_io, self._layer_sync is not None)
        return found + self.precision_plugin.problems(devices.kind_of(self.parallel_devices[0]))

    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Check everything that is known before training against the layout.

        Args:
            *objects: what the user hands to the Trainer: module, loaders, data module.
            trainer: the Trainer, whose callbacks are looked at.

        Raises:
            ConfigError: with every fault found.
        """
        world_size = self.num_nodes * self.num_processes
        model = next((item.model_shape for item in objects if isinstance(item, HasModelShape)), None)
        batch = next((item.batch_shape for item in objects if isinstance(item, HasBatchShape)), None)
        if batch is None:  # a plain DataLoader says only its batch size
            sizes = (getattr(item, "batch_size", None) for item in objects)
            batch = BatchShape(next((size for size in sizes if isinstance(size, int)), None))
        batch = replace(batch, micro_batch_size=self.micro_batch_size)
        found = self._environment_problems()
        if trainer is not None:
            found += callback_problems(trainer.callbacks)  # type: ignore[attr-defined]
        for module in (item for item in objects if isinstance(item, LightningModule)):
            found += module_problems(module, self._wished_layout.pp, trainer)
        layout = self._wished_layout if found else self._wished_layout.resolve(world_size)
        # Whether layers can be shared out is the partition's to say where the user wants it uneven.
        evenly = not any(self._split.values())
        found += [p for p in layout.problems(model=model, batch=batch) if evenly or p.argument != "pp"]
        if model is not None and not evenly:
            try:
                self.all_stages(model.num_layers)
            except ConfigError as error:
                found += error.problems
        raise_if_any(found)

    def all_stages(self, num_layers: int) -> tuple[StageLayers, ...]:
        """What every stage of the pipeline builds of a model of ``num_layers`` layers."""
        layout = self._wished_layout
        return partition(num_layers, layout.pp, layout.vpp, **self._split)  # type: ignore[arg-type]

    def stages(self, num_layers: int) -> list[StageLayers] | None:
        """What this rank's stages build; ``None`` without a pipeline."""
        if self.boundary is None:
            return None
        return [stage for stage in self.all_stages(num_layers) if stage.rank == self.mesh.pp.rank]

    def setup_environment(self) -> None:
        """Start the process groups; from here on :attr:`mesh` exists."""
        super().setup_environment()
        self.set_world_ranks()
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        self.check(self.lightning_module, getattr(trainer, "datamodule", None), trainer=trainer)
        if self._mesh is None:
            self._mesh = self._create_mesh()
            self._mesh.deferred.enabled = self._schedule == "zero-bubble" and self.boundary is not None
            self._logs = LogSharing(self._mesh.pp, self.root_device)
            self._agree_on_seed()

    def _create_mesh(self) -> ParallelMesh:
        assert self.cluster_environment is not None
        if self.world_size > 1 and not dist.is_initialized():
            # The environment variables, not an address: under torchrun the store is torchrun's own.
            os.environ.setdefault("MASTER_ADDR", str(self.cluster_environment.main_address))
            os.environ.setdefault("MASTER_PORT", str(self.cluster_environment.main_port))
            dist.init_process_group(
                self._backend or devices.kind_of(self.root_device).backend,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        if not dist.is_initialized():
            return ParallelMesh.single(self.root_device)
        mesh = ParallelMesh.create(self._wished_layout, self.root_device, self._timeout)
        rank_zero_info(f"{type(self).__name__}: {mesh.layout}")
        return mesh

    def _agree_on_seed(self) -> None:
        """Ranks that build shards of one model must draw the same numbers, also if the user has not seeded anything."""
        seed = self._seed = self.broadcast(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)
        self.mesh.rng.seed(seed % (1 << 62), tp_rank=self.mesh.tp.rank, pp_rank=self.mesh.pp.rank)

    def setup(self, trainer: Trainer) -> None:
        """Place the model, and for training put it and the optimizers on flat buffers."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._release_optimizers()
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        MetricSharing(self.mesh, self.root_device).install(self.lightning_module)

    def process_dataloader(self, dataloader: object) -> object:
        """Let ranks that read the same samples draw the same random numbers in workers."""
        return share_randomness(dataloader, self.mesh, self._seed)

    def model_to_device(self) -> None:
        """Move the model to this process's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the user configure optimizers, then put flat main parameters into their groups."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        self._tied = self._tied_names()
        held = self._tied and {name for name, _, _ in named_specs(self.lightning_module)}.intersection(self._tied)
        mode = self.precision_plugin.mode
        overlap_gather = self._overlap_param_gather and not watches_parameters(trainer)
        for optimizer in self.optimizers:
            sharded = ShardedOptimizer(
                optimizer,
                named_specs(self.lightning_module),
                self.mesh,
                shard=self._distributed_optimizer,
                main_dtype=mode.main,
                grad_dtype=mode.grads,
                reduce_dtype=self._reduce_dtype(trainer),
                overlap_grad_reduce=self._overlap_grad_reduce,
                overlap_param_gather=overlap_gather,
                bucket_size=self._bucket_size,
                hold=held,
            )
            sharded.install_gather_hooks(self.lightning_module)
            self._sharded.append(sharded)
        self.precision_plugin.manage(self._sharded)

    def _tied_names(self) -> tuple[str, ...]:
        """Parameters that first and last stage both hold; every rank hears of them."""
        assert self.lightning_module is not None
        own = sorted(spec.tied_with for _, _, spec in named_specs(self.lightning_module) if spec.tied_with)
        if self.boundary is None:
            return tuple(own)
        told: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(told, own, group=self.mesh.host_group)
        return tuple(sorted({name for names in told for name in names}))

    def _reduce_dtype(self, trainer: Trainer) -> torch.dtype | None:
        if self._grad_reduce_dtype is not None:
            return _REDUCE_DTYPES[self._grad_reduce_dtype]
        if devices.kind_of(self.root_device) is devices.HPU and self.precision_plugin.mode.params == torch.bfloat16:
            return grad_reduce_dtype_rule(trainer.accumulate_grad_batches, self.data_parallel_size)
        return None

    def _release_optimizers(self) -> None:
        for sharded in self._sharded:
            sharded.close()
        self._sharded.clear()
        self._open_windows.clear()
        self.optimizers = []
        self.lr_scheduler_configs = []

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a user's ``training_step``; with several micro-batches, forward and backward of them all.

        With one micro-batch this is stock Lightning: the loss keeps its graph and :meth:`backward` differentiates it.
        """
        assert self.lightning_module is not None
        self._open_window()
        batch, *rest = [*args, *kwargs.values()]
        micro_batches = split_batch(batch, self.micro_batch_size)
        module = self.lightning_module
        if self.boundary is None and (len(micro_batches) == 1 or not module.automatic_optimization):
            with self.precision_plugin.train_step_context():
                return module.training_step(*args, **kwargs)
        scale = self.precision_plugin.scale_of_loss() / module.trainer.accumulate_grad_batches
        finishing = [] if self._accumulating else self._sharded
        work = TrainingWork(module, micro_batches, tuple(rest), self._at(), scale, finishing)
        layout, axis = self.layout, self.mesh.pp
        plan = training_plan(self._schedule, layout.pp, layout.vpp, len(micro_batches), axis.rank)
        with self.precision_plugin.train_step_context():
            self._runtime().run(plan, work)
        for sharded in finishing:
            gradients = [(name, sharded.main_grad(name)) for names in sharded.group_names() for name in names]
            sum_tied_gradients(gradients, self._tied, self.mesh.ends)
        self._backward_is_done = True
        assert self._logs is not None
        return work.output(self._logs.finish("training_step", work.logs, work.loss))

    def _at(self) -> StageBoundary:
        """The pipeline's boundary; for a model in one piece, one that is never met."""
        return self.boundary or StageBoundary(1)

    def _runtime(self) -> PipelineRuntime:
        mesh, dtype = self.mesh, self.precision_plugin.mode.params
        return PipelineRuntime(mesh.pp, self._at().num_stages, self.root_device, dtype, mesh.deferred)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate, unless the schedule has done so; the hooks fire either way."""
        assert self.lightning_module is not None
        if self._backward_is_done:
            self._backward_is_done = False
            self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
            return self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self._open_window()
        # Under manual optimization nobody says which backward is the last one: then all is sent at the step.
        last = self.lightning_module.automatic_optimization and not self._accumulating
        for sharded in self._sharded:
            sharded.sync = last
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            for sharded in self._sharded:
                sharded.sync = False

    def _open_window(self) -> None:
        """Zero gradients where a window of accumulation begins.

        Lightning's own ``zero_grad``, which comes between ``training_step`` and ``backward``, reaches only the main
        parameters, whose gradients are not there yet.
        """
        for sharded in self._sharded:
            if sharded in self._open_windows:
                sharded.attach_grads()
            else:
                sharded.zero_grads()
                self._open_windows.add(sharded)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning accumulates: gradients inside are not the last of their step."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """One step of the user's optimizer; ends the window of accumulation."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._open_windows -= {sharded for sharded in self._sharded if sharded.optimizer is optimizer}
        return result

    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradient over the whole model, before clipping; equal on all ranks."""
        return self.precision_plugin.grad_norm()

    def finish_param_gather(self) -> None:
        """Wait until all parameters have the values of the last step; their modules' forwards wait by themselves."""
        for sharded in self._sharded:
            sharded.finish_param_gather()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``validation_step`` on every micro-batch."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``test_step`` on every micro-batch."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``predict_step`` on every micro-batch, outputs joined."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        batch, *rest = [*args, *kwargs.values()]
        micro_batches = split_batch(batch, self.micro_batch_size)
        step = getattr(self.lightning_module, name)
        if self.boundary is None and len(micro_batches) == 1:
            with self.precision_plugin.forward_context():
                return step(*args, **kwargs)
        work = EvaluationWork(self.lightning_module, step, micro_batches, tuple(rest), self._at())
        layout, axis = self.layout, self.mesh.pp
        with self.precision_plugin.forward_context():
            self._runtime().run(evaluation_plan(layout.pp, layout.vpp, len(micro_batches), axis.rank), work)
        assert self._logs is not None
        self._logs.finish(name, work.logs, None)
        if name == "predict_step" and self._broadcast_predictions:
            return broadcast_object(work.output(), axis, axis.size - 1, self.root_device)
        return work.output()

    def on_train_end(self) -> None:
        """Leave whole parameters behind."""
        self.finish_param_gather()

    # Talking

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=devices.barrier_device_ids(self.root_device))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of rank ``src``."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.mesh.host_group if self._mesh is not None else None)
        return box[0]

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over ``group``; by default over data-parallel ranks, so that each sample counts once.

        A mean is a sum divided by us: not every backend has one.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        axis = self.mesh.dp_cp
        if group is None and axis.size == 1:
            return tensor
        group = axis.group if group is None else group
        operations = {"mean": "SUM", "avg": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}
        how = reduce_op.lower() if isinstance(reduce_op, str) else "mean" if reduce_op is None else None
        operation = reduce_op if how is None else getattr(dist.ReduceOp, operations.get(how, how.upper()))
        mean = how in ("mean", "avg")
        out = tensor.float() if mean and not tensor.is_floating_point() else tensor.clone()
        dist.all_reduce(out, op=operation, group=group)
        return out / dist.get_world_size(group) if mean else out

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any) say yes; over the whole job, unlike :meth:`reduce`."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(float(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes > 0)

    # Checkpoints

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

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: optimizer state goes from where it lies to the files, see :meth:`save_checkpoint`."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a sharded checkpoint; called by all ranks.

        Raises:
            TypeError: for ``storage_options``, which no sharded strategy of Lightning takes.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes local directories and takes no storage_options")
        assert self.lightning_module is not None
        self.finish_param_gather()
        save_trainer_checkpoint(
            self.broadcast(str(filepath)),
            checkpoint,
            self.lightning_module,
            self._sharded,
            self.mesh,
            sharded=self._distributed_optimizer,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any layout in place; called by all ranks."""
        assert self.lightning_module is not None
        checkpoint, self._saved_randomness = load_trainer_checkpoint(
            self.broadcast(str(checkpoint_path)),
            self.lightning_module,
            self._sharded,
            self.mesh,
            sharded=self._distributed_optimizer,
            weights_only=weights_only,
        )
        if self._saved_randomness is not None:
            continue_randomness(self._saved_randomness, self.mesh)
        return checkpoint

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Resume in mid-epoch with the random numbers of the uninterrupted run.

        A loader that begins draws a seed from torch's generator, which it would not have done in mid-epoch.
        """
        if self._saved_randomness is not None and batch_idx > 0:
            continue_randomness(self._saved_randomness, self.mesh)
        self._saved_randomness = None

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the parameters."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_checkpoint` has filled the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; one rank does it."""
        if self.is_global_zero:
            remove_checkpoint(filepath)

    @property
    def sharded_optimizers(self) -> tuple[ShardedOptimizer, ...]:
        """The distributed optimizers, one for each of the user's."""
        return tuple(self._sharded)

    def teardown(self) -> None:
        """Let go of the environment. Parameters stay where they are: they are views of flat buffers."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.finish_param_gather()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="megatron")`` and ``"megatron_hpu"`` work."""
        for name in ("megatron", "megatron_hpu"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=cls.__doc__.splitlines()[0])  # type: ignore[union-attr]


MegatronHPUStrategy = MegatronStrategy

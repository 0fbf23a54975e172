"""The last layer of the strategy: public arguments, the launcher, and the checks before any process is started."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from torch.optim import Optimizer

from lightning_megatron import device as devices
from lightning_megatron.arguments import checked
from lightning_megatron.config.recompute_plan import RecomputeMethod
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.compat.accelerator import register_with_lightning_habana
from lightning_megatron.lightning.environments.agreement import rank_problems
from lightning_megatron.lightning.launch.launcher import LaunchCalls, launcher_of
from lightning_megatron.lightning.monitoring.memory_prediction import MemoryPrediction
from lightning_megatron.lightning.monitoring.terminal import Terminal
from lightning_megatron.lightning.step.grad_reduction import GradReduceDtype
from lightning_megatron.lightning.strategy.run import RunStrategy
from lightning_megatron.lightning.validation.accelerators import accelerator_problems
from lightning_megatron.lightning.validation.features import compile_problems, plugin_problems
from lightning_megatron.lightning.validation.job import (
    ELSEWHERE,
    RULES,
    Job,
    backend_problems,
    document_problems,
    job_problems,
)
from lightning_megatron.lightning.validation.memory import MemoryLimit, limit_of
from lightning_megatron.lightning.validation.nodes import node_problems
from lightning_megatron.lightning.validation.settings import CPCommType, JobSettings
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.pipeline.schedule import PipelineSchedule
from lightning_megatron.stage import StageLayers

_OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "precision_plugin")
"""Arguments that go to Lightning's base class."""


class MegatronStrategy(RunStrategy):
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
        cp_comm_type: communication of context-parallel attention: ``"p2p"`` (a ring), ``"all_gather"`` or ``"a2a"``.
        first_stage_layers: layers of the first stage; ``None`` for an even share.
        last_stage_layers: layers of the last stage; ``None`` for an even share.
        count_embedding: let the embedding take the place of one layer when layers are shared out.
        count_loss: let the output layer and the loss take the place of one layer.
        pipeline_layout: every stage spelled out in Megatron's letters, e.g. ``"Et*3|t*4|t*4L"``; or ``"balanced"``:
            shares that are even in work, of which the output layer of a large vocabulary has as much as several layers.
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
        recompute: activations computed again in backward instead of being kept: ``"selective"`` (core attention),
            ``"full"`` (layers), ``"moe"`` (experts), or some of ``"core_attn"``, ``"attention"``, ``"mlp"``, ``"moe"``.
        recompute_method: method of ``"full"``: ``"uniform"`` (groups of layers) or ``"block"`` (some layers of each
            stage).
        recompute_num_layers: layers of a group, or of each stage, under ``"full"``.
        recompute_shard_saved: under ``"full"``, tp ranks share what is kept; for runs without sequence parallelism.
        compile: run every block of layers through ``torch.compile``: ``True`` for the device's own backend, or a name.
        gpu_migration: on Gaudi, run modules written for NVIDIA's devices as they are, by Intel's toolkit; no effect
            elsewhere.
        ops: choice among the implementations of each op, e.g. ``{"attention": "off"}`` or
            ``"attention=off,rms_norm=require"``: ``"auto"`` (the best there is), ``"require"`` (a kernel of the
            device's own, or an error), ``"off"`` (the reference in plain torch), or a variant such as attention's
            ``"fast_softmax"``. ``lightning-megatron ops`` lists them.
        fp8: linear layers that ``ops={"linear_fp8": ...}`` is about, and their scaling.
        check_for_nan_in_loss_and_grad: end the run where a loss, gradient or parameter is NaN or infinite, naming it
            and its rank, and neither save nor load such a model. ``SpikeGuard`` skips such steps instead.
        verify_on_load: compare the content of all files of a checkpoint with its manifest before anything is taken from
            it; ranks share the reading. ``False`` compares lengths.
        async_save: while ``fit`` is running, write checkpoints in the background, from a copy in host memory.
        save_on_signal: end ``fit`` on SIGTERM, SIGUSR1 and Ctrl-C after a step, saved, as ``KillSwitch`` does.
        record_actions: keep each rank's last actions in ``default_root_dir/.actions`` for ``lightning-megatron why``,
            until all ranks end without an error.
        process_group_backend: ``None`` for the device's own: nccl, hccl, gloo.
        timeout: limit after which a collective that another rank does not join fails; ``None`` for 10 minutes, on
            Gaudi for 60, since ranks wait there for the one that compiles longest.
        max_memory: bytes, or text such as ``"80GB"``, that the tensors of a rank may take: a layout of which more is
            predicted is refused before any process starts, with the nearest that fits. ``None`` for the memory of the
            device; on a CPU nothing is refused then.
        may_differ: settings that ranks may be given differently, by the names in the error, e.g.
            ``["code.*"]``; ``["*"]`` for anything.
        accelerator: argument of Lightning's strategies, given by the Trainer.
        parallel_devices: likewise.
        cluster_environment: likewise.
        checkpoint_io: refused; checkpoints are sharded directories, written by all ranks.
        precision_plugin: a ``MegatronPrecision``, or leave it to ``Trainer(precision=...)``.

    Attributes:
        micro_batch_size: samples of one forward; ``None`` for the whole batch.
        boundary: beginning and end of model calls on this rank's pipeline stages; ``None`` without a pipeline.
        num_nodes: number of nodes, set by the Trainer.
        recompute: plan of the activations that models compute again.
        settings: arguments of the constructor, by name.
        op_modes: the argument ``ops``.

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
        timeout: timedelta | None = None,
        max_memory: int | str | None = None,
        may_differ: list[str] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        parts = {name: arguments[name] for name in _OF_LIGHTNING}
        super().__init__(JobSettings.of(arguments), **parts)
        self.settings = arguments
        self._memory, self._terminal = MemoryPrediction(), Terminal()
        self.recompute, self.op_modes = self._job.recompute, self._job.ops

    # Starting

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        register_with_lightning_habana(self.accelerator, type(self))
        raise_if_any(self._environment_problems())
        calls = LaunchCalls(self.check, self.note_error, self._begin_fit, self._compare_ranks, self._port)
        job = self.cluster_environment, self.num_processes, self.num_nodes
        self._launcher = launcher_of(*job, self.root_device, calls)

    def _environment_problems(self) -> list[Problem]:
        assert self.parallel_devices is not None
        found = rank_problems(self.cluster_environment, self.num_nodes, self.num_processes)
        found += self._job.layout.problems(world_size=self.num_nodes * self.num_processes)
        device = self.parallel_devices[0]
        found += plugin_problems(self.checkpoint_io, self._layer_sync, self._job.layout, device)
        found += self.ops.problems() + backend_problems(self._job.process_group_backend, device)
        found += accelerator_problems(device)
        found += node_problems(self._job.layout, self.num_nodes, self.num_processes, device)
        return found + self.precision_plugin.problems(devices.kind_of(device), self._job.layout)

    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Check everything that is known before training against the layout.

        Args:
            *objects: objects handed to the Trainer: module, loaders, data module, path of a checkpoint.
            trainer: the Trainer; its callbacks are checked, too.

        Raises:
            ConfigError: with every fault found.
        """
        found = self._environment_problems()
        layout = self._job.layout if found else self._job.layout.resolve(self.num_nodes * self.num_processes)
        if self._job.compile:
            found += compile_problems(objects, self.root_device, self.compile_backend)
        found += document_problems(objects, self.root_device)
        dtype = self.precision_plugin.mode.params
        opened = [self.open_once(item) for item in objects]
        job = Job(self._job, layout, self.ops, dtype, opened, trainer, self._memory_limit())
        raise_if_any(found + job_problems(job))
        self._memory.set(job.planned, job.memory_limit)

    def _memory_limit(self) -> MemoryLimit:
        """Memory that tensors of a rank may take, as far as this process can know it."""
        device = self.root_device
        size = devices.memory_of_device(device, is_taken=self._device_is_taken)
        is_known = size is not None or device.type == devices.CPU.type
        return limit_of(self._job, size, devices.device_name(device) if is_known else "")

    # Predicted memory

    def setup(self, trainer: Trainer) -> None:
        """Place the model and the optimizers, and tell the memory that is predicted; next comes the progress bar."""
        super().setup(trainer)
        self._memory.announce(type(self).__name__)
        self._terminal.open()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a batch; after the first steps, tell the memory that was measured."""
        super().on_train_batch_start(batch, batch_idx)
        if self.lightning_module is not None:
            steps = self.lightning_module.trainer.global_step
            self._memory.measure(type(self).__name__, steps, self.root_device, self.mesh.pp.rank)
            self._terminal.count(self.lightning_module.trainer, batch_idx)

    def on_train_end(self) -> None:
        """Leave whole parameters and durable checkpoints behind, and a progress bar that is at its end."""
        super().on_train_end()
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            self._terminal.count(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def teardown(self) -> None:
        """End the run, and release the environment."""
        self._terminal.close()
        super().teardown()

    def note_error(self, error: BaseException) -> bool:
        """Write the error down; one for want of memory gets the prediction, and the cheapest ways out."""
        if error is not self._record.error:
            self._memory.explain(error)
        return super().note_error(error)

    @property
    def compile_backend(self) -> str | None:
        """Backend that blocks are compiled with; ``None`` for no compilation."""
        own = devices.compile_backend(self.root_device) if self._job.compile else None
        return self._job.compile if isinstance(self._job.compile, str) else own

    def stages(self, num_layers: int, loss_cost: float = 1.0) -> list[StageLayers] | None:
        """Layers of this rank's stages; ``None`` without a pipeline.

        Args:
            num_layers: layers of the whole model.
            loss_cost: work of output layer and loss, in layers, for ``pipeline_layout="balanced"``; a module of yours
                says its own, e.g. ``TransformerConfig.loss_cost``. By default as much as one layer.
        """
        if self.boundary is None:
            return None
        stages = self._job.split.stages(num_layers, self.layout.pp, self.layout.vpp, loss_cost)
        return [stage for stage in stages if stage.rank == self.mesh.pp.rank]


MegatronHPUStrategy = MegatronStrategy

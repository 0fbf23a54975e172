"""``MegatronStrategy``: its arguments, what the Trainer assigns, and what user code may read and call in a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from torch import Tensor
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from lightning_megatron.arguments import checked
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputeMethod
from lightning_megatron.errors import raise_if_any
from lightning_megatron.lightning.compat.accelerator import preferred_accelerator, register_with_lightning_habana
from lightning_megatron.lightning.environments.mpi import environment_of_ranks
from lightning_megatron.lightning.launch.launcher import LaunchCalls, launcher_of
from lightning_megatron.lightning.step.grad_reduction import GradReduceDtype, MainGradsDtype
from lightning_megatron.lightning.strategy.hooks import StrategyHooks
from lightning_megatron.lightning.validation.job import ELSEWHERE, RULES
from lightning_megatron.lightning.validation.settings import CPCommType, JobSettings
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.ops.registry import Ops
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.pipeline.schedule import PipelineSchedule
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import Recorder
from lightning_megatron.stage import StageLayers

if TYPE_CHECKING:
    from lightning_megatron.checkpoint import Check
    from lightning_megatron.checkpoint.optimizer_export.export import HostMemory

_OF_LIGHTNING = ("accelerator", "parallel_devices", "cluster_environment", "precision_plugin")
"""Arguments that go to Lightning's base class."""


class MegatronStrategy(StrategyHooks):
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
        count_embedding: count the embedding as one layer when layers are divided among stages.
        count_loss: count the output layer and the loss as one layer.
        pipeline_layout: all stages in Megatron's notation, e.g. ``"Et*3|t*4|t*4L"``; or ``"balanced"`` for equal work
            of all stages: the output layer of a large vocabulary takes as much as several layers.
        broadcast_predictions: give ``predict_step``'s output to all pipeline stages, not only to the last.
        distributed_optimizer: shard main parameters and optimizer state over data-parallel ranks (ZeRO stage 1).
        elementwise_optimizers: further optimizers whose update of an element depends on that element alone: classes,
            import paths or bare names. Others run only where each rank holds whole parameters.
        overlap_grad_reduce: send gradients while backward is running.
        overlap_param_gather: gather parameters while the next forward is running; switched off if a callback or the
            module may read parameters between steps.
        main_grads_dtype: dtype in which gradients are accumulated: ``"fp32"``; ``"bf16"``, for bf16 parameters, which
            saves 2 bytes a parameter; or ``"auto"``: bf16 if a gradient sums at most 256 micro-batches over all
            replicas, else fp32 (Intel's rule). ``None`` for fp32, and for bf16 under ``"bf16-true"``.
        grad_reduce_dtype: dtype in which ranks sum gradients, ``"fp32"`` or ``"bf16"``; ``None`` for
            ``main_grads_dtype``, on Gaudi for bf16 parameters by Intel's rule.
        bucket_size: gradient elements sent at once; ``None`` for Megatron's ``max(40e6, 1e6 x dp)``.
        recompute: activations computed again in backward instead of being kept: ``"selective"`` (core attention),
            ``"full"`` (layers), ``"moe"`` (experts), or some of ``"core_attn"``, ``"attention"``, ``"mlp"``, ``"moe"``.
        recompute_method: method of ``"full"``: ``"uniform"`` (groups of layers) or ``"block"`` (some layers of each
            stage).
        recompute_num_layers: layers of a group, or of each stage, under ``"full"``.
        recompute_shard_saved: under ``"full"``, shard kept activations over tp; for runs without sequence parallelism.
        compile: run every block of layers through ``torch.compile``: ``True`` for the device's own backend, or a name.
        gpu_migration: on Gaudi, run modules written for CUDA unchanged, through Intel's GPU migration toolkit; no
            effect elsewhere.
        ops: choice among the implementations of each op, e.g. ``{"attention": "off"}`` or
            ``"attention=off,rms_norm=require"``: ``"auto"`` (the best there is), ``"require"`` (a kernel of the
            device's own, or an error), ``"off"`` (the reference in plain torch), or a variant such as attention's
            ``"fast_softmax"``. ``lightning-megatron ops`` lists them.
        fp8: linear layers to which ``ops={"linear_fp8": ...}`` applies, and their scaling.
        check_for_nan_in_loss_and_grad: end the run where a loss, gradient or parameter is NaN or infinite, naming it
            and its rank, and neither save nor load such a model. ``SpikeGuard`` skips such steps instead.
        verify_on_load: compare the content of all files of a checkpoint with its manifest before anything is loaded;
            each rank reads a part. ``False`` compares only file sizes.
        save_distributed_checkpoint: ``False`` to save one file through rank 0, as Lightning's one-device strategies do.
        async_save: while ``fit`` is running, write checkpoints in the background, from a copy in host memory.
        save_on_signal: end ``fit`` on SIGTERM, SIGUSR1 and Ctrl-C after a step, saved, as ``KillSwitch`` does.
        record_actions: keep each rank's last actions in ``default_root_dir/.actions`` for ``lightning-megatron why``,
            until all ranks end without an error.
        process_group_backend: ``None`` for the device's own: nccl, hccl, gloo.
        timeout: time after which a collective that another rank does not join fails; ``None`` for 10 minutes, on
            Gaudi for 60, since ranks wait there for the one that compiles longest.
        max_memory: limit for the tensors of a rank, in bytes or as text such as ``"80GB"``: a layout predicted to need
            more is refused before any process starts, and the nearest that fits is named. ``None`` for the memory of
            the device; on a CPU nothing is refused then.
        may_differ: settings that may differ between ranks, by their names in errors; ``["*"]`` for all.
        accelerator: argument of Lightning's strategies, given by the Trainer.
        parallel_devices: likewise.
        cluster_environment: likewise.
        checkpoint_io: refused; the strategy writes checkpoints itself.
        precision_plugin: a ``MegatronPrecision``, or leave it to ``Trainer(precision=...)``.

    Attributes:
        micro_batch_size: samples of one forward; ``None`` for the whole batch.
        boundary: beginning and end of model calls on this rank's pipeline stages; ``None`` without a pipeline.
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
        main_grads_dtype: MainGradsDtype | None = None,
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
        save_distributed_checkpoint: bool = True,
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
        self.recompute, self.op_modes = self._job.recompute, self._job.ops

    # What the Trainer assigns and asks

    @property
    def _accelerator(self) -> Accelerator | None:
        """Lightning's own attribute, which its Trainer reads for an accelerator that was given to the strategy."""
        return self._given_accelerator or preferred_accelerator(self.parallel_devices)

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._given_accelerator = accelerator

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Cluster environment; that of ``mpirun`` where Lightning has not detected it."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, cluster_environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = environment_of_ranks(cluster_environment)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by the Trainer."""
        return self._ranks.num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._ranks.num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return self._ranks.num_local

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers the rank of this process."""
        self._ranks.tell_rank()

    @property
    def is_distributed(self) -> bool:
        """True if there are several replicas: Lightning then shards loaders, and shuffles all of training's."""
        return self.data_parallel_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that differ only in tp, pp or cp read the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        register_with_lightning_habana(self.accelerator, type(self))
        raise_if_any(self._start.environment_problems())
        start = self._start.find_last, self._start.compare
        calls = LaunchCalls(self.check, self.note_error, *start, self._ranks.port)
        job = self.cluster_environment, self.num_processes, self.num_nodes
        self._launcher = launcher_of(*job, self.root_device, calls)

    # What a module, a callback or a script reads and calls

    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Check everything that is known before training against the layout.

        Args:
            *objects: objects passed to the Trainer: module, loaders, data module, path of a checkpoint.
            trainer: the Trainer; its callbacks are checked, too.

        Raises:
            ConfigError: with every fault found.
        """
        self._start.check(*objects, trainer=trainer)

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the Trainer's number of devices."""
        return self._ranks.layout

    @property
    def data_parallel_rank(self) -> int:
        """Data-parallel rank: index of the data shard that this rank reads."""
        return self._ranks.dp_rank

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas, which is that of data shards."""
        return self.layout.data_parallel_size

    @property
    def collective_timeout(self) -> timedelta:
        """Limit for a collective: the argument ``timeout``, or the default of the device."""
        return self._ranks.timeout

    @property
    def recorder(self) -> Recorder:
        """Record of this rank's actions."""
        return self._ranks.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._ranks.recorder = recorder

    def during(self, kind: Kind, detail: str = "") -> AbstractContextManager[None]:
        """Bracket a phase in the record of this rank.

        Args:
            kind: kind of the phase.
            detail: subject of the phase, such as a path.
        """
        return self._record.during(kind, detail)

    @property
    def ops(self) -> Ops:
        """Implementations of ops that models choose from, on the devices of the Trainer."""
        return self._ranks.ops

    @property
    def compile_backend(self) -> str | None:
        """Backend that blocks are compiled with; ``None`` for no compilation."""
        return self._ranks.compile_backend

    def stages(self, num_layers: int, loss_cost: float = 1.0) -> list[StageLayers] | None:
        """Layers of this rank's stages; ``None`` without a pipeline.

        Args:
            num_layers: layers of the whole model.
            loss_cost: cost of output layer and loss, in layers, for ``pipeline_layout="balanced"``; a module of yours
                passes its own, e.g. ``TransformerConfig.loss_cost``. By default as much as one layer.
        """
        if self.boundary is None:
            return None
        stages = self._job.split.stages(num_layers, self.layout.pp, self.layout.vpp, loss_cost)
        return [stage for stage in stages if stage.rank == self.mesh.pp.rank]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of rank ``src``."""
        return self._ranks.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Tensors of all ranks, or of those of a group, stacked."""
        self._ranks.trials.agree()
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Reduce over ``group``; by default over data-parallel ranks, so that each sample counts once."""
        return self._ranks.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if ``decision`` is True on all ranks, or, with ``all=False``, on any; over all ranks of the job."""
        return self._ranks.vote(decision, all)

    @property
    def sharded_optimizers(self) -> tuple[ShardedOptimizer, ...]:
        """The distributed optimizers, one for each of the user's; none outside ``fit``."""
        return self._params.sharded

    def finish_param_gather(self) -> None:
        """Wait until all parameters have the values of the last step; their modules' forwards wait by themselves."""
        self._params.finish_gather()

    def refresh_main_params(self) -> None:
        """Copy all parameters to their main values, at once.

        Without this call, weights written between steps are detected at the next step or save.
        """
        self._params.refresh_main()

    def main_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict`` with main values in the place of parameters, on the host; all ranks call this.

        After ``bf16-mixed`` and ``16-mixed`` parameters of this package's layers are half precision; these are the fp32
        values that have been trained. They exist from the start of a ``fit`` to that of the next. As in ``state_dict``,
        a rank has its shard of parameters that tensor and pipeline parallelism split.
        """
        return self._params.main_state_dict(self._ranks.module)

    def grad_norm(self) -> Tensor:
        """L2 norm of the last step's gradient over the whole model, before clipping; equal on all ranks."""
        return self.precision_plugin.grad_norm()

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norm of every parameter's gradient over the whole model, by global name, equal on all ranks.

        For ``on_before_optimizer_step``, on all ranks; parameters without a gradient are left out.
        """
        return {} if self._params.optimizers is None else self._params.optimizers.grad_norms()

    def export_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Write the state of all optimizers to one safetensors file; called by all ranks while ``fit`` runs.

        Tensors have global names and the shapes of whole parameters. The file is the same for any layout and level.

        Args:
            path: the file, on a file system that the nodes share; published under this name when complete.
            memory_level: part of the state in host memory at once: ``"parallel_node_0"``, ``"parallel_multi_node"``,
                ``"serial_per_node"`` or ``"serial_per_dp_groups"``.
            ranks_per_node: processes on a node; ``None`` for the Trainer's number.

        Returns:
            Host memory that the export took on this rank.
        """
        return self._params.export(path, memory_level, ranks_per_node)

    def load_optimizer_state(
        self, path: str | Path, memory_level: str = "serial_per_dp_groups", ranks_per_node: int | None = None
    ) -> HostMemory:
        """Load such a file into optimizers and main values, and from these into parameters; the same arguments."""
        return self._params.load(path, memory_level, ranks_per_node)

    @property
    def load_check(self) -> Check:
        """Extent to which the files of a checkpoint are compared with its manifest before it is loaded."""
        return self.checkpoints.load_check

    @property
    def saved_in_run(self) -> Mapping[str, int]:
        """Paths of the checkpoints that this run has written or resumed from, with their steps."""
        return self.checkpoints.saved

    def finish_save(self) -> None:
        """Wait until the checkpoint that is being written in the background is durable; called by all ranks."""
        self.checkpoints.finish()

    def finish_copy(self) -> None:
        """Wait until no background save reads optimizer state. Call this before you change it between steps.

        Optimizer steps, loads and all other code in this package wait by themselves.
        """
        self.checkpoints.writer.finish_copy()

    def rewind(self, path: str) -> None:
        """Load parameters, buffers and optimizer state from a checkpoint; called by all ranks between two steps.

        Steps, samples, learning rates and their schedules, the loss scale and random numbers are kept: the samples
        since the checkpoint are not read again. Reading them again would lead to the same state again.

        Args:
            path: path of a checkpoint with optimizer state.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        self.checkpoints.rewind(path)

    def rewind_validation(self) -> None:
        """Set every generator to its state at the start of the current validation, which a resumed run repeats."""
        self.checkpoints.randomness.rewind_validation()


MegatronHPUStrategy = MegatronStrategy

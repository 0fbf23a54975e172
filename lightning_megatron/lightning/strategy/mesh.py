"""The first layer of the strategy: ranks on a mesh, their process groups, data and collectives."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities import rank_zero_only as pl_rank_zero_only
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_in_place
from lightning_megatron.comm.loopback import LoopbackPort
from lightning_megatron.comm.objects import all_gather_object, barrier, broadcast_pickled
from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import described
from lightning_megatron.lightning.compat._private import default_store, injects_samplers
from lightning_megatron.lightning.compat.accelerator import preferred_accelerator
from lightning_megatron.lightning.environments.mpi import environment_of_ranks
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.lightning.strategy.process_end import ProcessEnd
from lightning_megatron.lightning.streams.dataloaders import (
    share_randomness,
    shuffle_by_epoch,
    start_workers_safely,
)
from lightning_megatron.lightning.streams.generators import generator_hashes, seed_generators
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.host import raise_open_files
from lightning_megatron.mesh import Axis, ParallelMesh
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.ops.registry import Ops
from lightning_megatron.recorder.recorder import Recorder

_log = logging.getLogger(__name__)

_MEANS = {"mean": ("SUM", True), "avg": ("SUM", True)}


class MeshStrategy(ParallelStrategy):
    """Ranks, devices and collectives, on which checkpoints and training are built.

    Args:
        job: settings of the job.
        **parts: objects that any strategy of Lightning may be given.

    Attributes:
        num_nodes: number of nodes, set by the Trainer.
        recorder: record of this rank's actions.
    """

    def __init__(self, job: JobSettings, **parts: Any) -> None:
        self._own_precision = MegatronPrecision()
        super().__init__(**parts)
        self.num_nodes = 1
        self.recorder = Recorder()
        self._job = job
        self._mesh: ParallelMesh | None = None
        self._store: Store | None = None
        self._port = LoopbackPort()
        self._end = ProcessEnd()
        self._device_is_taken = False
        self._seed = 0

    @property
    def _accelerator(self) -> Accelerator | None:
        """Lightning's own attribute, which its Trainer reads for an accelerator that was given to the strategy."""
        return self._given_accelerator or preferred_accelerator(self.parallel_devices)

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._given_accelerator = accelerator

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Environment of the ranks: ``mpirun``'s, where Lightning has missed it."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, cluster_environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = environment_of_ranks(cluster_environment)

    @property
    def ops(self) -> Ops:
        """Implementations of ops that models choose from, on the devices of the Trainer."""
        assert self.parallel_devices is not None
        return Ops(self.parallel_devices[0].type, self._job.ops, self._job.fp8 or Fp8Recipe())

    @property
    def precision_plugin(self) -> MegatronPrecision:
        """Always a :class:`MegatronPrecision`, and one object: it takes on the precision that Lightning assigns."""
        # Lightning's own attribute: its connector reads there a plugin that was given to the strategy.
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else self._own_precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else self._own_precision.adopt(precision_plugin)

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups of this rank, from ``setup_environment`` on.

        Raises:
            RuntimeError: before ``setup_environment``.
        """
        if self._mesh is None:
            raise RuntimeError("the mesh exists from `configure_model` on, once the Trainer has started its processes")
        return self._mesh

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the Trainer's number of devices."""
        return self._job.layout.resolve(self.world_size) if self._mesh is None else self._mesh.layout

    @property
    def data_parallel_rank(self) -> int:
        """Number of the share of the data that this rank reads."""
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
    def collective_timeout(self) -> timedelta:
        """Limit for a collective: the argument ``timeout``, or the default of the device."""
        return self._job.timeout or devices.collective_traits(self.root_device).timeout

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """True if there are several replicas: Lightning then shards loaders, and shuffles all of training's."""
        return self.data_parallel_size > 1

    @abstractmethod
    def check(self, *objects: object, trainer: Trainer | None = None) -> None:
        """Refuse what cannot work. Abstract, so that LightningCLI offers only the complete strategy."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that differ only in tp, pp or cp read the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    # Starting

    def _take_device(self) -> None:
        """Take this process's card, keep freed memory, and raise the limit of open files for its connections."""
        files = raise_open_files(self.world_size)
        if files.fault:
            rank_zero_warn(f"{files.subject}: {files.value}; {files.fault}")
        ranks = {"world_size": self.world_size, "rank": self.global_rank, "local_rank": self.local_rank}
        devices.take_card(self.root_device, **ranks)
        self._device_is_taken = True
        devices.keep_freed_memory(self.root_device)
        super().setup_environment()
        self.set_world_ranks()

    def setup_environment(self) -> None:
        """Take this process's device."""
        self._take_device()

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers the rank of this process."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = pl_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _meet(self) -> Store | None:
        """The store where all ranks meet; ``None`` for a rank that is alone."""
        assert self.cluster_environment is not None
        if self.world_size == 1:
            self._store = None
        elif dist.is_initialized():
            self._store = default_store()
        else:
            # The environment variables, not an address: under torchrun the store is torchrun's own.
            os.environ.setdefault("MASTER_ADDR", str(self.cluster_environment.main_address))
            os.environ.setdefault("MASTER_PORT", str(self.cluster_environment.main_port))
            ranks = self.global_rank, self.world_size
            if self.num_nodes == 1 and not dist.is_torchelastic_launched():
                self._store = self._port.store(self.cluster_environment.main_port, *ranks, self.collective_timeout)
            else:
                self._store, _, _ = next(rendezvous("env://", *ranks, timeout=self.collective_timeout))
        return self._store

    def _create_mesh(self) -> ParallelMesh:
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group(
                self._job.process_group_backend or devices.kind_of(self.root_device).backend,
                store=self._store,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self.collective_timeout,
            )
        if not dist.is_initialized():
            return ParallelMesh.single(self.root_device, self.recorder)
        self._register_end()
        return ParallelMesh.create(self._job.layout, self.root_device, self.collective_timeout, self.recorder)

    def _register_end(self) -> None:
        if dist.is_initialized() and devices.collective_traits(self.root_device).exit_waits:
            self._end.register()

    def _connect_groups(self) -> None:
        """Let the ranks of each group connect now where a backend leaves it to the first collective."""
        mesh = self.mesh
        self._end.own([axis.group for axis in mesh.device_axes if axis.group is not None], mesh.host_group)
        if (
            not mesh.is_distributed
            or mesh.connect_seconds
            or not devices.collective_traits(self.root_device).connects_at_first_use
        ):
            return
        cards = all_gather_object(mesh, devices.card_variables())
        rank_zero_info(f"cards of the ranks: {devices.describe_cards(cards)}")
        mesh.connect()
        for axis in mesh.device_axes:
            seconds = mesh.connect_seconds[axis.name]
            rank_zero_info(f"{axis.name} ({axis.size} ranks): the first collective took {seconds:.1f} s")

    def _agree_on_seed(self) -> None:
        """Ranks that build shards of one model must draw the same numbers, also if the user has not seeded anything."""
        seed = self._seed = self.broadcast(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)
        mesh = self.mesh
        place = {"tp_rank": mesh.tp.rank, "pp_rank": mesh.pp.rank, "cp_rank": mesh.cp.rank, "pp_size": mesh.pp.size}
        mesh.rng.seed(seed % (1 << 62), **place)

    def _draw_alike(self) -> None:
        """Ranks that read the same samples must draw the same numbers, whatever their scripts have seeded and drawn."""
        mesh = self.mesh
        found = all_gather_object(mesh, (mesh.dp.rank, generator_hashes()))
        replica = [hashes for dp_rank, hashes in found if dp_rank == mesh.dp.rank]
        different = [name for name, hashed in replica[0].items() if any(hashes[name] != hashed for hashes in replica)]
        seed_generators(self._seed + mesh.dp.rank, different)

    def process_dataloader(self, dataloader: object) -> object:
        """Let ranks that read the same samples read them in one order, and draw the same random numbers in workers."""
        start_workers_safely(dataloader, self.root_device)
        if not self.is_distributed and injects_samplers(self.lightning_module):
            shuffle_by_epoch(dataloader)
        return share_randomness(dataloader, self.mesh)

    def model_to_device(self) -> None:
        """Move the model to this process's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    # Collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            barrier(self._axis("world"), self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of rank ``src``."""
        return broadcast_pickled(obj, self._axis("host"), src) if dist.is_initialized() else obj

    def _axis(self, name: Literal["world", "host"]) -> Axis:
        """All ranks, also before there is a mesh."""
        return Axis(name, action_log=self.recorder.main) if self._mesh is None else getattr(self._mesh, name)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce over ``group``; by default over data-parallel ranks, so that each sample counts once.

        Context-parallel ranks have seen the same samples: a model gives them all the whole loss and whole logits.
        A mean is a sum and a division: not every backend has a mean.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        axis = self.mesh.dp
        if group is None and axis.size == 1:
            return tensor
        group = axis.group if group is None else group
        operation, mean = _operation(reduce_op)
        out = tensor.float() if mean and not tensor.is_floating_point() else tensor.clone()
        others = Axis("a group of the caller's", group=group, action_log=self.recorder.main)
        all_reduce_in_place(out, axis if group is axis.group else others, operation)
        return out / dist.get_world_size(group) if mean else out

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks (or any) say yes; over the whole job, unlike :meth:`reduce`."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(float(decision), device=self.root_device)
        all_reduce_in_place(votes, self._axis("world"))
        return bool(votes == self.world_size) if all else bool(votes > 0)

    def _log_error(self, exception: BaseException) -> None:
        """Log the rank that failed, with its place in the model: of many tracebacks one is the cause."""
        if self._mesh is None or not self._mesh.is_distributed:
            return
        layout, pp = self._mesh.layout, self._mesh.pp
        stages = list(range(pp.rank, layout.pp * layout.vpp, layout.pp))
        held = "" if pp.size == 1 else f", which runs {'stage' if len(stages) == 1 else 'stages'} {stages}"
        notes = "".join(f"; {note}" for note in getattr(exception, "__notes__", ()))
        text = described(exception) + " ".join(notes.split())
        _log.error("%r%s, failed with %s", self._mesh, held, text)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="megatron")`` and ``"megatron_hpu"`` work."""
        for name in ("megatron", "megatron_hpu"):
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description=cls.__doc__.splitlines()[0])  # type: ignore[union-attr]


def _operation(reduce_op: dist.ReduceOp | str | None) -> tuple[Any, bool]:
    """Torch's operation for Lightning's name of it, and True if its result is to be divided by the number of ranks."""
    if reduce_op is not None and not isinstance(reduce_op, str):
        return reduce_op, False
    name = "mean" if reduce_op is None else reduce_op.lower()
    operation, mean = _MEANS.get(name, (name.upper(), False))
    return getattr(dist.ReduceOp, operation), mean

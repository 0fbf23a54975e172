"""This rank and the others of its job: its device, its process groups, and collectives over all ranks."""

from __future__ import annotations

import copy
import logging
import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities import rank_zero_only as pl_rank_zero_only
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_megatron import device as devices
from lightning_megatron.comm.collectives import all_reduce_in_place
from lightning_megatron.comm.loopback import LoopbackPort
from lightning_megatron.comm.objects import all_gather_object, barrier, broadcast_pickled
from lightning_megatron.comm.p2p import greet_neighbours
from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import described
from lightning_megatron.lightning.compat._private import default_store
from lightning_megatron.lightning.strategy.memory_trials import MemoryTrials
from lightning_megatron.lightning.strategy.process_end import ProcessEnd
from lightning_megatron.lightning.streams.generators import copy_generators, generator_hashes
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine import network
from lightning_megatron.machine.host import raise_open_files
from lightning_megatron.mesh import Axis, ParallelMesh, coordinate, dense_grid
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.ops.registry import Ops
from lightning_megatron.params import named_specs
from lightning_megatron.pipeline.tied_embeddings import StageParameters, gather_stages
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import Recorder

_log = logging.getLogger(__name__)


class JobRanks:
    """This rank and the others of its job.

    Attributes:
        strategy: strategy of this rank: the environment and the devices that the Trainer gives it.
        job: settings of the job.
        num_nodes: number of nodes.
        recorder: record of this rank's actions.
        port: rendezvous port of the ranks of this machine.
        end: exit hook of this process.
        trials: trials of a search for a batch size.
        device_is_taken: True once this process has its device.
    """

    def __init__(self, strategy: ParallelStrategy, job: JobSettings) -> None:
        self.strategy, self.num_nodes, self.job = strategy, 1, job
        self.recorder, self.port, self.end, self.trials = Recorder(), LoopbackPort(), ProcessEnd(), MemoryTrials()
        self.device_is_taken = False
        self._mesh: ParallelMesh | None = None
        self._store: Store | None = None

    @property
    def module(self) -> LightningModule:
        """The user's module; the strategy has one from the start of a run."""
        module = self.strategy.lightning_module
        assert module is not None
        return module

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups of this rank; a ``RuntimeError`` before they are made."""
        if self._mesh is None:
            raise RuntimeError("the mesh exists from `configure_model` on, once the Trainer has started its processes")
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh

    @property
    def is_connected(self) -> bool:
        """True if there is a mesh."""
        return self._mesh is not None

    @property
    def layout(self) -> ParallelLayout:
        """The layout for the Trainer's number of devices."""
        return self.job.layout.resolve(self.strategy.world_size) if self._mesh is None else self._mesh.layout

    def copied(self, memo: dict[int, Any]) -> Any:
        """The strategy in a deep copy of an object that refers to it, such as a callback with its Trainer.

        It is copied before the mesh exists, and the same object afterwards: groups, threads and locks have no copies.
        """
        strategy = self.strategy
        if self.is_connected:
            return strategy
        memo[id(strategy)] = found = type(strategy).__new__(type(strategy))
        vars(found).update(copy.deepcopy(vars(strategy), memo))
        return found

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: index of the data shard that this rank reads; known also before the mesh exists."""
        rank = self.strategy.global_rank if self._mesh is None else self._mesh.rank
        return coordinate(dense_grid(self.layout), rank)["dp"]

    @property
    def num_local(self) -> int:
        """Processes on this node."""
        return len(self.strategy.parallel_devices or ())

    @property
    def timeout(self) -> timedelta:
        """Timeout of a collective: the argument ``timeout``, or the default of the device."""
        return self.job.timeout or devices.collective_traits(self.strategy.root_device).timeout

    @property
    def ops(self) -> Ops:
        """Implementations of ops, on the devices of the Trainer."""
        assert self.strategy.parallel_devices is not None
        return Ops(self.strategy.parallel_devices[0].type, self.job.ops, self.job.fp8 or Fp8Recipe())

    @property
    def compile_backend(self) -> str | None:
        """Backend that blocks are compiled with; ``None`` for no compilation."""
        own = devices.compile_backend(self.strategy.root_device) if self.job.compile else None
        return self.job.compile if isinstance(self.job.compile, str) else own

    # Starting

    def take_device(self) -> None:
        """Take this process's card, keep freed memory, and raise the limit of open files for its connections."""
        own = self.strategy
        assert own.accelerator is not None
        files = raise_open_files(own.world_size)
        if files.fault:
            rank_zero_warn(f"{files.subject}: {files.value}; {files.fault}")
        ranks = {"world_size": own.world_size, "rank": own.global_rank, "local_rank": own.local_rank}
        layout = self.job.layout
        devices.order_launches(own.root_device, tp=layout.tp, cp=layout.cp, ep=layout.ep)
        devices.take_card(own.root_device, **ranks)
        self.device_is_taken = True
        devices.keep_freed_memory(own.root_device)
        own.accelerator.setup_device(own.root_device)
        self.tell_rank()

    def tell_rank(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers the rank of this process."""
        own = self.strategy
        if own.cluster_environment is not None:
            own.cluster_environment.set_global_rank(own.node_rank * self.num_local + own.local_rank)
            own.cluster_environment.set_world_size(self.num_nodes * self.num_local)
        rank_zero_only.rank = pl_rank_zero_only.rank = own.global_rank  # type: ignore[attr-defined]

    def meet(self) -> Store | None:
        """Rendezvous store; ``None`` in a job of one process."""
        own = self.strategy
        environment, ranks = own.cluster_environment, (own.global_rank, own.world_size)
        assert environment is not None
        if own.world_size == 1:
            self._store = None
        elif dist.is_initialized():
            self._store = default_store()
        else:
            # The environment variables, not an address: under torchrun the store is torchrun's own.
            os.environ.setdefault("MASTER_ADDR", str(environment.main_address))
            os.environ.setdefault("MASTER_PORT", str(environment.main_port))
            if self.num_nodes == 1 and not dist.is_torchelastic_launched():
                self._store = self.port.store(environment.main_port, *ranks, self.timeout)
            else:
                if self.num_nodes > 1:
                    self._name_interface()
                self._store, _, _ = next(rendezvous("env://", *ranks, timeout=self.timeout))
        return self._store

    def _name_interface(self) -> None:
        """Name gloo a network interface if other machines could not reach the address that it would take."""
        name, found = network.gloo_interface(os.environ["MASTER_ADDR"])
        if name is not None:
            os.environ[network.VARIABLE] = name
        if (name is not None or found.fault) and self.strategy.local_rank == 0:
            _log.warning("%s: %s", found.subject, found.fault or found.value)

    def create_mesh(self) -> ParallelMesh:
        """Create the process groups; all ranks call this."""
        own = self.strategy
        if own.world_size > 1 and not dist.is_initialized():
            devices.connect_on_demand(own.world_size)
            dist.init_process_group(
                self.job.process_group_backend or devices.kind_of(own.root_device).backend,
                store=self._store,
                rank=own.global_rank,
                world_size=own.world_size,
                timeout=devices.backend_timeout(own.root_device, self.timeout),
            )
        if not dist.is_initialized():
            return ParallelMesh.single(own.root_device, self.recorder)
        self.register_end()
        return ParallelMesh.create(self.job.layout, own.root_device, self.timeout, self.recorder)

    def register_end(self) -> None:
        """Register the exit hook of this process, on devices whose processes must end together."""
        if dist.is_initialized() and devices.collective_traits(self.strategy.root_device).exit_waits:
            self.end.register()

    def connect_groups(self) -> None:
        """Connect the ranks of each group now, if the backend would connect them in the first collective only."""
        mesh = self.mesh
        self.end.own([axis.group for axis in mesh.device_axes if axis.group is not None], mesh.host_group)
        if (
            not mesh.is_distributed
            or mesh.connect_seconds
            or not devices.collective_traits(self.strategy.root_device).connects_at_first_use
        ):
            return
        cards = all_gather_object(mesh, devices.card_variables())
        if any(cards):
            rank_zero_info(f"cards of the ranks: {devices.describe_cards(cards)}")
        mesh.connect()
        rings = {mesh.pp: mesh.layout.vpp > 1} | ({mesh.cp: True} if mesh.layout.cp_comm_type == "p2p" else {})
        for axis, is_ring in rings.items():
            if axis.size > 1:
                with mesh.connecting(f"{axis.name} messages"):
                    greet_neighbours(axis, self.strategy.root_device, is_ring, rotates=axis is mesh.cp)
        for name, seconds in mesh.connect_seconds.items():
            axis = getattr(mesh, name.partition(" ")[0])
            what = "messages" if "messages" in name else "collective"
            free = f", and {mesh.free_bytes[name] / (1 << 30):.1f} GiB are free" if name in mesh.free_bytes else ""
            rank_zero_info(f"{axis.name} ({axis.size} ranks): the first {what} took {seconds:.1f} s{free}")

    def agree_on_seed(self) -> None:
        """Ranks that build shards of one model must draw the same numbers, also if the user has not seeded anything."""
        seed = self.broadcast(torch.initial_seed())
        if seed != torch.initial_seed():
            torch.manual_seed(seed)
        self.mesh.rng.place(tp_rank=self.mesh.tp.rank, cp_rank=self.mesh.cp.rank)

    def draw_alike(self) -> None:
        """Ranks that read the same samples draw what the first of them draws, whatever their scripts have seeded."""
        found = all_gather_object(self.mesh, (self.mesh.dp.rank, generator_hashes()))
        first = dict(reversed(found))  # by replica
        if any(hashes != first[replica] for replica, hashes in found):
            copy_generators(self.mesh)

    # Collectives

    def gather_stages(self) -> list[StageParameters]:
        """Parameters of every pipeline rank; all ranks call this."""
        return gather_stages(StageParameters.of(named_specs(self.module)), self.mesh)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.trials.agree()
        if dist.is_initialized():
            barrier(self._axis("world"), self.strategy.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks the object of rank ``src``."""
        self.trials.agree()
        return broadcast_pickled(obj, self._axis("host"), src) if dist.is_initialized() else obj

    def _axis(self, name: Literal["world", "host"]) -> Axis:
        """All ranks, also before there is a mesh."""
        return Axis(name, action_log=self.recorder.main) if self._mesh is None else getattr(self._mesh, name)

    def reduce(self, tensor: Any, group: Any | None, reduce_op: dist.ReduceOp | str | None) -> Any:
        """Reduce over ``group``, by default over data-parallel ranks.

        Context-parallel ranks have seen the same samples: a model gives them all the whole loss and whole logits.
        A mean is computed as a sum and a division, since not every backend has a mean.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        self.trials.agree()
        axis = self.mesh.dp
        if group is None and axis.size == 1:
            return tensor
        group = axis.group if group is None else group
        operation, mean = _operation(reduce_op)
        out = tensor.float() if mean and not tensor.is_floating_point() else tensor.clone()
        others = Axis("a group of the caller's", group=group, action_log=self.recorder.main)
        all_reduce_in_place(out, axis if group is axis.group else others, operation)
        return out / dist.get_world_size(group) if mean else out

    def vote(self, decision: bool, of_all: bool) -> bool:
        """True if ``decision`` is True on all ranks of the job, or, without ``of_all``, on any of them."""
        if not dist.is_initialized():
            return decision
        self.trials.agree()
        votes = torch.tensor(float(decision), device=self.strategy.root_device)
        all_reduce_in_place(votes, self._axis("world"))
        with self.recorder.main.during(Kind.DEVICE):
            return bool(votes == self.strategy.world_size) if of_all else bool(votes > 0)

    def log_error(self, exception: BaseException) -> None:
        """Log the rank that failed, with its place in the model: of many tracebacks one is the cause."""
        if self._mesh is None or not self._mesh.is_distributed:
            return
        layout, pp = self._mesh.layout, self._mesh.pp
        stages = list(range(pp.rank, layout.pp * layout.vpp, layout.pp))
        held = "" if pp.size == 1 else f", which runs {'stage' if len(stages) == 1 else 'stages'} {stages}"
        notes = "".join(f"; {note}" for note in getattr(exception, "__notes__", ()))
        text = described(exception) + " ".join(notes.split())
        _log.error("%r%s, failed with %s", self._mesh, held, text)


def _operation(reduce_op: dist.ReduceOp | str | None) -> tuple[Any, bool]:
    """Torch's operation for Lightning's name of it, and True if its result must be divided by the number of ranks."""
    if reduce_op is not None and not isinstance(reduce_op, str):
        return reduce_op, False
    is_mean = reduce_op is None or reduce_op.lower() in ("mean", "avg")
    return getattr(dist.ReduceOp, "SUM" if is_mean else str(reduce_op).upper()), is_mean

"""The device mesh of a rank: its coordinates, process groups and random streams.

Ranks are numbered in Megatron's default order, tp fastest: ``tp - cp - ep - dp - pp``. Dense layers see the grid
``tp x cp x dp x pp``; experts see ``etp x ep x edp x pp`` over the same ranks ("parallel folding",
https://arxiv.org/abs/2504.14960). The rank arithmetic is in pure functions; :class:`ParallelMesh` creates the groups.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron import device as devices
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.params import ShardRanks
from lightning_megatron.recorder.call import Call
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog, Recorder
from lightning_megatron.rng import RNGStreams
from lightning_megatron.weight_grad_store import WeightGradStore


def dense_grid(layout: ParallelLayout) -> dict[str, int]:
    """Axis sizes of dense layers, fastest axis first."""
    return {"tp": layout.tp, "cp": layout.cp, "dp": layout.data_parallel_size, "pp": layout.pp}


def expert_grid(layout: ParallelLayout) -> dict[str, int]:
    """Axis sizes of expert layers over the same ranks, fastest axis first."""
    return {
        "etp": layout.expert_tensor_parallel_size,
        "ep": layout.ep,
        "edp": layout.expert_data_parallel_size,
        "pp": layout.pp,
    }


def rank_groups(grid: Mapping[str, int], axes: Sequence[str]) -> list[tuple[int, ...]]:
    """All groups of ranks that differ only in ``axes``.

    Args:
        grid: axis sizes, fastest axis first.
        axes: the axes that vary inside a group.

    Returns:
        The groups in order of their first rank; inside a group, the axis that is fastest in ``grid`` is fastest.
    """
    sizes = list(grid.values())
    names = list(grid)
    # In numpy's C order the last axis is fastest, hence the reversals.
    ranks = np.arange(math.prod(sizes)).reshape(sizes[::-1])
    moving = [len(names) - 1 - names.index(name) for name in sorted(axes, key=names.index, reverse=True)]
    fixed = [i for i in range(len(names)) if i not in moving]
    table = ranks.transpose(*fixed, *moving).reshape(-1, math.prod(grid[name] for name in axes))
    return [tuple(row) for row in table.tolist()]


def axis_groups(layout: ParallelLayout) -> dict[str, Sequence[tuple[int, ...]]]:
    """All groups of ranks of each axis, by its name; for ``embedding`` without the ranks of inner stages."""
    dense, expert = dense_grid(layout), expert_grid(layout)
    found: dict[str, Sequence[tuple[int, ...]]] = {name: rank_groups(dense, [name]) for name in dense}
    found["dp_cp"] = rank_groups(dense, ["dp", "cp"])
    found |= {name: rank_groups(expert, [name]) for name in ("etp", "ep", "edp")}
    found["etp_ep"] = rank_groups(expert, ["etp", "ep"])
    found["embedding"] = pipeline_ends(layout)
    found["world"] = rank_groups(dense, list(dense))
    return found


def uneven_groups(layout: ParallelLayout, devices_per_node: int) -> dict[str, tuple[int, ...]]:
    """First group of each axis of a resolved layout with unequal numbers of ranks on its nodes, if there is one."""
    groups = axis_groups(layout)
    del groups["world"]
    found = {}
    for name, kind in groups.items():
        for ranks in kind:
            if len(set(Counter(rank // devices_per_node for rank in ranks).values())) > 1:
                found[name] = ranks
                break
    return found


def pipeline_ends(layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
    """First and last rank of every pipeline; empty without a pipeline."""
    if layout.pp == 1:
        return ()
    return tuple((ranks[0], ranks[-1]) for ranks in rank_groups(dense_grid(layout), ["pp"]))


def coordinate(grid: Mapping[str, int], rank: int) -> dict[str, int]:
    """The position of ``rank`` on each axis of ``grid`` (fastest axis first)."""
    position = {}
    for name, size in grid.items():
        rank, position[name] = divmod(rank, size)
    return position


@dataclass(frozen=True)
class Axis:
    """One rank's view of one kind of parallelism.

    Attributes:
        name: ``"tp"``, ``"dp"``, ...
        size: ranks on the axis.
        rank: this rank's position on it.
        ranks: global ranks on the axis, by position.
        group: the process group; ``None`` if ``size == 1``.
        action_log: log of this rank's actions; ``None`` for no log.
        number: number of the group in that log.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    action_log: ActionLog | None = field(default=None, compare=False, repr=False)
    number: int = field(default=0, compare=False, repr=False)

    def call(self, kind: Kind, value: torch.Tensor | None = None, peer: int = -1) -> Call:
        """A record, in this rank's action log, of a collective or a message on this axis.

        Args:
            kind: kind of collective or message.
            value: tensor whose size in bytes is recorded.
            peer: global rank at the other end of a message.
        """
        if torch.compiler.is_compiling():  # a graph has no clock, and sizes may be symbols there
            return Call(None, kind, self.name, self.number, None, peer)
        return Call(self.action_log, kind, self.name, self.number, value, peer)

    def during(self, kind: Kind, detail: str = "") -> AbstractContextManager[None]:
        """Record the begin and end of a phase in this rank's action log.

        Args:
            kind: kind of phase.
            detail: subject of the phase, such as a path.
        """
        return nullcontext() if self.action_log is None else self.action_log.during(kind, detail)

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # a process group is a handle, which copies of a model share

    def __reduce__(self) -> tuple[object, ...]:
        # Modules are pickled into hyper-parameters and spawned workers; coordinates can be pickled, a group cannot.
        return Axis, (self.name, self.size, self.rank, self.ranks, None)


def _count_members(group: dist.ProcessGroup, device: torch.device | None) -> float:
    """All-reduce a 1 over a group, and read the sum back, which waits for the collective."""
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)
    return one.item()


class ParallelMesh:
    """The groups of one rank; layers and schedules receive it, or one :class:`Axis` of it, as an argument.

    Attributes:
        layout: the resolved layout.
        rank: global rank.
        tp, cp, dp, pp: axes of dense layers.
        etp, ep, edp: axes of experts.
        etp_ep: expert tensor and expert parallel: the ranks that together hold every expert once (the group of token
            dispatch).
        dp_cp: data and context parallel: the ranks that share gradients and optimizer state of dense layers.
        embedding: first and last stage of this rank's pipeline, which share tied embeddings; for a rank of any other
            stage, that rank alone.
        world: all ranks.
        rng: the random streams of this rank.
        weight_grads: store of the weight gradients that layers defer (zero-bubble schedules).
        host: all ranks, over the group for objects and for tensors in host memory.
        recorder: recorder of this rank's actions.
        connect_seconds: seconds of each group's first collective, by axis, if :meth:`connect` was called.
        free_bytes: free memory of the device after it, by axis; empty on a CPU.

    Args:
        layout: number of ranks on each axis; ``dp`` must be resolved.
        rank: global rank of this process.
        groups: process group of each axis longer than 1, by axis name.
        device: the device whose random generator the streams use.
        recorder: recorder of this rank's actions.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        rank: int = 0,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        groups = groups or {}
        self.recorder = recorder or Recorder()
        self.layout = layout
        self.rank = rank
        self.rng = RNGStreams(device)
        self.weight_grads = WeightGradStore()

        def recorded(axis: Axis) -> Axis:
            return replace(axis, action_log=self.recorder.main, number=self.recorder.group(axis.name, axis.ranks))

        members = axis_groups(layout)

        def axis(name: str) -> Axis:
            ranks = next((g for g in members[name] if rank in g), (rank,))
            return recorded(Axis(name, len(ranks), ranks.index(rank), ranks, groups.get(name)))

        self.tp = axis("tp")
        self.cp = axis("cp")
        self.dp = axis("dp")
        self.pp = axis("pp")
        self.dp_cp = axis("dp_cp")
        self.embedding = axis("embedding")
        self.etp = axis("etp")
        self.ep = axis("ep")
        self.edp = axis("edp")
        self.etp_ep = axis("etp_ep")
        self.world = axis("world")
        self.host = recorded(replace(self.world, name="host", group=groups.get("host")))
        self._background = self.recorder.group("background", self.world.ranks)
        self.connect_seconds: dict[str, float] = {}
        self.free_bytes: dict[str, int] = {}

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """The group of :attr:`host`."""
        return self.host.group

    @classmethod
    def single(cls, device: torch.device | None = None, recorder: Recorder | None = None) -> ParallelMesh:
        """A mesh of one rank, without processes: a model built on it is the reference for all other layouts."""
        return cls(ParallelLayout().resolve(1), device=device, recorder=recorder)

    @classmethod
    def create(
        cls,
        layout: ParallelLayout,
        device: torch.device,
        timeout: timedelta | None = None,
        recorder: Recorder | None = None,
    ) -> ParallelMesh:
        """Build the groups of a job whose default process group is initialized. Every rank must call this.

        Groups with the same members are built once. ``new_group`` gets only ranks and timeout: Gaudi's oldest
        supported bridge accepts only (ranks, timeout, backend, pg_options).
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        layout = layout.resolve(world)
        built: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

        def group_among(members: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
            if not members or len(members[0]) == 1:
                return None
            if len(members[0]) == world:
                return dist.group.WORLD
            if members not in built:
                mine = None
                for ranks in members:
                    group = dist.new_group(list(ranks), timeout=devices.backend_timeout(device, timeout))
                    mine = group if rank in ranks else mine
                built[members] = mine
            return built[members]

        wanted = {name: group_among(tuple(members)) for name, members in axis_groups(layout).items()}
        # Objects and checkpoint plans are sent over gloo on every device: accelerators' backends send only tensors.
        if devices.kind_of(device) is devices.CPU or world == 1:
            wanted["host"] = dist.group.WORLD
        else:
            wanted["host"] = dist.new_group(list(range(world)), timeout=timeout, backend=devices.CPU.backend)
        return cls(layout, rank, {name: group for name, group in wanted.items() if group is not None}, device, recorder)

    @property
    def device_axes(self) -> tuple[Axis, ...]:
        """One axis for each group for tensors of the device that this rank is in, in the order of their creation."""
        dense = (self.world, self.tp, self.cp, self.dp, self.pp, self.dp_cp, self.embedding)
        found: dict[int, Axis] = {}
        for axis in (*dense, self.etp, self.ep, self.edp, self.etp_ep):
            if axis.group is not None:
                found.setdefault(id(axis.group), axis)
        return tuple(found.values())

    def connect(self) -> None:
        """Run one collective of one element on every group of this rank. Every rank must call this.

        Some backends connect the members of a group at its first collective. Without this call that happens in the
        middle of a step, where a rank may compile for long while others wait, and where a broken cable looks like a
        fault of the model.

        Raises:
            RuntimeError: if a sum is wrong.
        """
        for axis in self.device_axes:
            with self.connecting(axis.name):
                counted = axis.call(Kind.ALL_REDUCE).run(_count_members, axis.group, self.rng.device)
            if counted != axis.size:
                raise RuntimeError(
                    f"the first sum over {axis.name} (ranks {list(axis.ranks)}) is wrong: {axis.size} ranks gave 1 "
                    f"each, and the sum is {counted:g}. The network or a device is at fault, not the model"
                )

    @contextmanager
    def connecting(self, name: str) -> Iterator[None]:
        """Note how long the context, in which ranks connect, takes, and the device's memory after it."""
        begun = time.monotonic()
        yield
        self.connect_seconds[name] = time.monotonic() - begun
        free = None if self.rng.device is None else devices.free_memory_bytes(self.rng.device)
        if free is not None:
            self.free_bytes[name] = free

    @property
    def shard_ranks(self) -> ShardRanks:
        """Position of this rank on the axes that shard parameters."""
        return ShardRanks(self.tp.rank, self.etp.rank, self.ep.rank)

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one rank."""
        return self.world.size > 1

    @property
    def is_alive(self) -> bool:
        """True if the process groups still exist."""
        return not self.is_distributed or (dist.is_initialized() and self.world.group is dist.group.WORLD)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The axes longer than 1 as a torch ``DeviceMesh``, slowest first, under Lightning's long dimension names.

        Built over the groups that exist already: no communicator is added.
        """
        names = {
            "pipeline_parallel": self.pp,
            "data_parallel": self.dp,
            "context_parallel": self.cp,
            "tensor_parallel": self.tp,
        }
        axes = {name: axis for name, axis in names.items() if axis.group is not None}
        if not axes:
            axes = {"data_parallel": self.dp}
        grid = torch.arange(self.world.size).reshape([axis.size for axis in axes.values()])
        world = dist.group.WORLD
        assert world is not None
        groups = [axis.group or world for axis in axes.values()]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], device_type, mesh=grid, mesh_dim_names=tuple(axes)
        )

    def host_axis(self, name: str, groups: Sequence[Sequence[int]], timeout: timedelta) -> Axis:
        """Axis over the one of ``groups`` that has this rank, with a new group on the host. Every rank must call this.

        Args:
            name: name of the axis.
            groups: ranks of each group; together all ranks of the job.
            timeout: limit for a collective.
        """
        made = [dist.new_group(list(ranks), timeout=timeout, backend=devices.CPU.backend) for ranks in groups]
        ranks, group = next((tuple(r), group) for r, group in zip(groups, made, strict=True) if self.rank in r)
        number = self.recorder.group(name, ranks)
        return Axis(name, len(ranks), ranks.index(self.rank), ranks, group, self.recorder.main, number)

    def with_new_host_group(self, timeout: timedelta | None = None) -> ParallelMesh:
        """This mesh with a new host group, for a thread that communicates concurrently. Every rank must call this.

        :meth:`destroy_host_group` frees it; a single rank has none.
        """
        other = copy.copy(self)
        if self.is_distributed:
            ranks = list(range(self.world.size))
            group = dist.new_group(ranks, timeout=timeout, backend=devices.CPU.backend)
            own, number = self.recorder.background, self._background
            other.host = replace(self.host, name="background", group=group, action_log=own, number=number)
        return other

    def destroy_host_group(self) -> None:
        """Free the group of :meth:`with_new_host_group`."""
        if self.is_distributed:
            dist.destroy_process_group(self.host_group)

    def __deepcopy__(self, memo: dict[int, object]) -> ParallelMesh:
        return self  # a copy of a model, such as averaged weights, is on the same rank

    def __repr__(self) -> str:
        place = ", ".join(f"{a.name} {a.rank}/{a.size}" for a in (self.tp, self.cp, self.dp, self.pp) if a.size > 1)
        return f"ParallelMesh(rank {self.rank}/{self.world.size}{': ' + place if place else ''})"

"""Faults of a batch, found on the host and raised on all ranks.

Ranks of one replica read the same batch and find the same fault. Other replicas do not, and would wait for a rank that
has raised. So a rank with a bad batch goes on with a repaired one, and a message between hosts, under way during the
training step (or at the end of an evaluation), ends the run everywhere.

Ranks of one replica that read different batches train one model on parts of different samples. So hashes of the first
batches of a run and of an epoch, and of a few later ones, are compared before their step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import DataError
from lightning_megatron.lightning._private import trainer_of
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind

FIRST = 3
"""Batches at the begin of a run, an epoch and an evaluation that are compared."""
EVERY = 100
"""Distance of the later ones."""


@runtime_checkable
class ChecksBatches(Protocol):
    """A module that can find faults of a batch."""

    def batch_fault(self, batch: Any) -> str | None:
        """Fault of a batch on the host; ``None`` if it has none."""
        ...

    def without_faults(self, batch: Any) -> Any:
        """Repaired batch that the model can compute with."""
        ...


class BatchWatch:
    """Checks batches before they are moved to the device.

    Args:
        mesh: mesh of this rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._fault: str | None = None
        self._vote: Pending | None = None
        self._has_peers = mesh.world.size > mesh.dp.size
        self._trained = self._evaluated = 0
        self._is_due = False
        self._hashes: dict[str, int] = {}

    def _note_hashes(self, module: Any, batch: Any) -> None:
        trainer = trainer_of(module)
        if trainer is None or not self._has_peers:
            return
        leaves = list(_leaves(batch, ""))
        if any(type(leaf) is not Tensor for _, leaf in leaves if isinstance(leaf, Tensor)):  # no values: a rehearsal
            return
        if trainer.training:
            number, name = trainer.fit_loop.batch_idx, "batch"
            self._is_due = min(number, self._trained) < FIRST or number % EVERY == 0
            self._trained += 1
        else:  # compared at the end, since replicas may have different numbers of batches
            number, name = self._evaluated, f"batch {self._evaluated}"
            self._evaluated += 1
        if self._is_due if trainer.training else number < FIRST:
            self._hashes |= {name + key: _hash_of(leaf) for key, leaf in leaves}

    def _compare(self) -> None:
        """Compare within each replica, with one message of all ranks.

        Raises:
            DataError: on all ranks, if ranks of any replica have different hashes.
        """
        mesh, own = self._mesh, zlib.crc32(repr(sorted(self._hashes.items())).encode())
        votes = torch.full((2, mesh.dp.size), -(1 << 40))
        votes[:, mesh.dp.rank] = torch.tensor([own, -own])
        mesh.host.call(Kind.ALL_REDUCE, votes).run(dist.all_reduce, votes, dist.ReduceOp.MAX, group=mesh.host_group)
        hashes, self._hashes = self._hashes, {}
        self._is_due, self._evaluated = False, 0
        if torch.equal(votes[0], -votes[1]):
            return
        found = all_gather_object(mesh, (mesh.dp.rank, hashes))
        of_replica: dict[int, list[int]] = {}
        for rank, (replica, _) in enumerate(found):
            of_replica.setdefault(replica, []).append(rank)
        for ranks in of_replica.values():
            keys = [key for key in found[ranks[0]][1] if len({found[rank][1].get(key) for rank in ranks}) > 1]
            if len({repr(found[rank][1]) for rank in ranks}) > 1:
                raise DataError(
                    f"ranks {ranks} are one replica of the model and read different samples:"
                    f" {', '.join(keys) or 'keys'} differ. Ranks that differ only in tp, pp or cp must read the same"
                    " ones: divide data by strategy.data_parallel_rank and strategy.data_parallel_size, not by RANK and"
                    " WORLD_SIZE; and draw random numbers in data in the same way on all ranks"
                )

    def look(self, module: object, batch: Any) -> Any:
        """Check a batch; returns it, or a repaired one for a step that will not count.

        Args:
            module: user's module.
            batch: batch on the host.

        Raises:
            DataError: for a fault that all ranks have found.
        """
        self._note_hashes(module, batch)
        fault = module.batch_fault(batch) if isinstance(module, ChecksBatches) else None
        if fault is None:
            return batch
        if self._mesh.dp.size == 1:
            raise DataError(fault)
        assert isinstance(module, ChecksBatches)
        self._fault = self._fault or fault
        return module.without_faults(batch)

    def begin(self, module: object) -> None:
        """Compare batches that are due, and start to collect the results of all ranks. Every rank must call this.

        Raises:
            DataError: on all ranks, if ranks of one replica have read different batches.
        """
        trainer = trainer_of(module) if isinstance(module, LightningModule) else None
        if self._has_peers and trainer is not None and (self._is_due or not trainer.training):
            self._compare()
        if self._mesh.dp.size > 1 and isinstance(module, ChecksBatches):
            vote = torch.tensor(int(self._fault is not None))
            call, group = self._mesh.host.call(Kind.ALL_REDUCE, vote), self._mesh.host_group
            work = call.issue(dist.all_reduce, vote, dist.ReduceOp.MAX, group=group, async_op=True)
            self._vote = Pending(vote, work, call)

    def settle(self) -> None:
        """Wait for the results of all ranks.

        Raises:
            DataError: on all ranks, if any of them has found a fault.
        """
        if self._vote is None:
            return
        vote, self._vote = self._vote, None
        if vote.wait().item():
            self._raise_everywhere()

    def _raise_everywhere(self) -> None:
        faults: list[str | None] = [None] * self._mesh.world.size
        own = None if self._fault is None else f"data-parallel rank {self._mesh.dp.rank}: {self._fault}"
        self._fault = None
        call = self._mesh.host.call(Kind.ALL_GATHER_OBJECT)
        call.run(dist.all_gather_object, faults, own, group=self._mesh.host_group)
        raise DataError("; ".join(dict.fromkeys(fault for fault in faults if fault is not None)))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and texts of a batch, with their places."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}[{number}]")
    else:
        yield name, value


def _hash_of(value: Any) -> int:
    """Hash of the values of a tensor on the host, of a number or a text; of anything else, that of its type."""
    if isinstance(value, Tensor):
        about = repr((value.dtype, tuple(value.shape))).encode()
        is_here = value.device.type == "cpu" and value.layout == torch.strided
        data: Any = value.detach().contiguous().flatten().view(torch.uint8).numpy() if is_here else b""
        return zlib.crc32(data, zlib.crc32(about))
    return zlib.crc32(repr(value if isinstance(value, str | int | float | None) else type(value)).encode())

"""Faults of a batch, found on the host and raised on all ranks.

Ranks of one replica read the same batch and find the same fault. Other replicas do not, and would wait for a rank that
has raised. So a rank with a bad batch goes on with a repaired one, and a message between hosts, under way during the
training step (or at the end of an evaluation), ends the run everywhere.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lightning_megatron.comm.collectives import Pending
from lightning_megatron.errors import DataError
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.file_format import Kind


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

    def look(self, module: object, batch: Any) -> Any:
        """Check a batch; returns it, or a repaired one for a step that will not count.

        Args:
            module: user's module.
            batch: batch on the host.

        Raises:
            DataError: for a fault that all ranks have found.
        """
        fault = module.batch_fault(batch) if isinstance(module, ChecksBatches) else None
        if fault is None:
            return batch
        if self._mesh.dp.size == 1:
            raise DataError(fault)
        assert isinstance(module, ChecksBatches)
        self._fault = self._fault or fault
        return module.without_faults(batch)

    def begin(self, module: object) -> None:
        """Start to collect the results of all ranks. Every rank must call this."""
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

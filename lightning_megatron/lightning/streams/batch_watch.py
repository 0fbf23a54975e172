"""Faults of a batch, found on the host and raised on all ranks.

Ranks of one replica read the same batch and find the same fault. Other replicas do not, and would wait for a rank that
has raised. So a rank with a bad batch continues with a repaired one, and an all-reduce between hosts, in the background
of the training step (or at the end of an evaluation), ends the run everywhere.

Ranks of one replica that read different batches would train one model on parts of different samples. So hashes of the
first batches of a run and of an epoch, and of a few later ones, are compared before their step (after it if the step
reads a ``dataloader_iter``); those of each loader of an evaluation are compared at its end.

Ranks of one replica that draw different random numbers would part likewise, for instance after a callback that draws on
rank 0 alone. So their generators are compared before each step, and those of the first rank replace the others.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_megatron.comm.collectives import MAX, Pending, all_reduce_max, start_all_reduce_in_place
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.errors import DataError
from lightning_megatron.lightning.compat._private import trainer_of
from lightning_megatron.lightning.streams.containers import entries_of
from lightning_megatron.lightning.streams.generators import copy_generators, generators_checksum
from lightning_megatron.mesh import ParallelMesh

FIRST = 3
"""Number of batches that are compared at the start of a run, an epoch and an evaluation."""
EVERY = 100
"""Interval of later comparisons, in batches."""

_ALONE = nullcontext()


class ChecksBatches(Protocol):
    """A module that can find faults of a batch."""

    def batch_fault(self, batch: Any) -> str | None:
        """Fault of a batch on the host; ``None`` if it has none."""
        ...

    def without_faults(self, batch: Any) -> Any:
        """Repaired batch that the model can compute with."""
        ...


class BatchWatch:
    """Checks batches before they are moved to the device."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._fault: str | None = None
        self._vote: Pending | None = None
        self._has_peers = mesh.host.size > mesh.dp.size
        self._trained = 0
        self._evaluated: Counter[int] = Counter()
        self._is_due = False
        self._moved: tuple[Any, int] | None = None
        self._hashes: dict[str, int] = {}
        self._begun: Any = None

    def begin_batch(self, module: LightningModule) -> None:
        """Hash the batch that was moved last, which is the loop's; from here on a user's hooks may move others."""
        moved, self._moved = self._moved, None
        if moved is not None and self._has_peers and not _reads_iterator(module):
            self._note_hashes(module, *moved)
            self._begun = moved[0]

    def end_batch(self, module: LightningModule, batch: Any, loader: int = 0) -> None:
        """Hash a batch that the step has read itself, or ``None``, for which Lightning runs no training step.

        Raises:
            DataError: in training, on all ranks, if ranks of one replica have different batches.
        """
        if self._has_peers and (_reads_iterator(module) or (batch is None and module.trainer.training)):
            self._note_hashes(module, batch, loader)
            if self._is_due and module.trainer.training:
                self.compare()

    def _note_hashes(self, module: LightningModule, batch: Any, loader: int) -> None:
        trainer = module.trainer
        if trainer.training:
            number, name = trainer.fit_loop.batch_idx, "batch"
            self._is_due = min(number, self._trained) < FIRST or number % EVERY == 0
        else:  # compared at the end, since replicas may have different numbers of batches
            number, name = self._evaluated[loader], f"batch {self._evaluated[loader]} of loader {loader}"
            self._evaluated[loader] += 1
        if self._is_due if trainer.training else number < FIRST:
            self._hashes |= _hashes_of(batch, name)

    def compare(self) -> None:
        """Compare the noted hashes and random generators within each replica, with one all-reduce over all ranks.

        Where generators differ, all ranks of a replica go on with those of its first rank, if its batches are equal.

        Raises:
            DataError: on all ranks, if ranks of any replica have different hashes.
        """
        if not self._has_peers:
            return
        mesh, hashes = self._mesh, self._hashes
        self._hashes, self._is_due = {}, False
        self._evaluated.clear()
        own = zlib.crc32(repr(sorted(hashes.items())).encode()), generators_checksum(mesh.rng.device)
        votes = torch.full((2, 2, mesh.dp.size), -(1 << 40))
        votes[..., mesh.dp.rank] = torch.tensor([own, [-value for value in own]])
        most, least = all_reduce_max(votes, mesh.host)
        read_alike, draw_alike = map(torch.equal, most, -least)
        if not draw_alike:
            copy_generators(mesh)
            hashes |= _hashes_of(self._begun, "batch")  # data sets may have drawn it in this process
        elif read_alike:
            return
        found = all_gather_object(mesh, (mesh.dp.rank, hashes))
        for replica in range(mesh.dp.size):
            ranks = [rank for rank, (its, _) in enumerate(found) if its == replica]
            keys = [key for key in found[ranks[0]][1] if len({found[rank][1].get(key) for rank in ranks}) > 1]
            if any(found[rank][1] != found[ranks[0]][1] for rank in ranks):
                raise DataError(
                    f"ranks {ranks} are one replica of the model and read different samples:"
                    f" {', '.join(keys) or 'keys'} differ. Ranks that differ only in tp, pp or cp must read the same"
                    " ones: divide data by strategy.data_parallel_rank and strategy.data_parallel_size, not by RANK and"
                    " WORLD_SIZE; and draw random numbers in data in the same way on all ranks"
                )

    def look(self, module: object, batch: Any, loader: int = 0) -> Any:
        """Check a batch on the host; return it, or a repaired one for a step that is discarded.

        Raises:
            DataError: for a fault that all ranks find, since there is one replica.
        """
        if self._has_peers:
            self._moved = batch, loader
        if not _checks_batches(module) or (fault := module.batch_fault(batch)) is None:
            return batch
        if self._mesh.dp.size == 1:
            raise DataError(fault)
        self._fault = self._fault or fault
        return module.without_faults(batch)

    def step(self, module: object) -> AbstractContextManager[None]:
        """Context of a training step, or of the end of an evaluation; every rank must enter it.

        Random generators, and hashes that are due, are compared first; whether any rank found a fault is all-reduced
        during the step.

        Raises:
            DataError: on all ranks, if any of them has found a fault, or ranks of one replica have read different
                batches.
        """
        return _ALONE if self._mesh.host.size == 1 else self._step(module)

    @contextmanager
    def _step(self, module: object) -> Iterator[None]:
        trainer = trainer_of(module) if isinstance(module, LightningModule) else None
        if trainer is not None:
            self.compare()
        self._begun = None
        self._trained += 1
        if self._mesh.dp.size > 1 and _checks_batches(module):
            vote = torch.tensor(int(self._fault is not None))
            self._vote = start_all_reduce_in_place(vote, self._mesh.host, MAX)
        yield
        if self._vote is None:
            return
        pending, self._vote = self._vote, None
        if pending.wait().item():
            own = None if self._fault is None else f"data-parallel rank {self._mesh.dp.rank}: {self._fault}"
            self._fault = None
            raise DataError("; ".join(dict.fromkeys(filter(None, all_gather_object(self._mesh, own)))))


def _checks_batches(module: object) -> TypeGuard[ChecksBatches]:
    """True for a module that can find faults; a look at its class, as each batch asks for it."""
    return hasattr(type(module), "batch_fault")


def _reads_iterator(module: LightningModule) -> bool:
    """True if steps of the present stage are given the iterator over batches, and not a batch."""
    stage = module.trainer.state.stage
    name = {"train": "training", "val": "validation"}.get(prefix := str(stage and stage.dataloader_prefix), prefix)
    return is_param_in_hook_signature(getattr(module, f"{name}_step"), "dataloader_iter", explicit=True)


def _hashes_of(batch: Any, name: str) -> dict[str, int]:
    return {key: _hash_of(leaf) for key, leaf in _leaves(batch, name)}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Names and values of the leaves of a batch, in all containers that Lightning moves to a device."""
    if isinstance(value, Tensor) and value.is_nested:
        value = value.unbind()
    entries = entries_of(value, name)
    if entries is None:
        yield name, value
    for its_name, _, item in entries or ():
        yield from _leaves(item, its_name)


def _hash_of(value: Any) -> int:
    """Hash of the values of a tensor or an array, of a number or a text; of anything else, that of its type."""
    data: Any = b""
    if isinstance(value, Tensor):
        about: Any = value.dtype, tuple(value.shape)
        with suppress(RuntimeError, TypeError):  # of a tensor that is not one block of values: a sparse one
            data = value.detach().resolve_conj().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        about, data = (value.dtype, value.shape), value.tobytes()
    else:
        about = value if isinstance(value, str | bytes | int | float | complex | np.generic | None) else type(value)
    return zlib.crc32(data, zlib.crc32(repr(about).encode()))

"""Numbers of batches of loaders, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.lightning.streams.end_of_data import DataState, uneven_error
from lightning_megatron.mesh import ParallelMesh

STREAM = float("inf")
"""Number of batches of data without a known length."""


def gather_counts(mesh: ParallelMesh, counts: Sequence[float], loaders: Any) -> tuple[list[list[float]], bool]:
    """Gather the numbers of batches of all ranks, and True if all are certain. Every rank must call this.

    Args:
        counts: numbers of batches, of each loader or of all together.
        loaders: a loader, or lists and mappings of loaders; a stream may end before its limit, or before its length.
    """
    certain = STREAM not in counts and not any(_streams(loader) for loader in CombinedLoader(loaders).flattened)
    gathered = all_gather_object(mesh, (list(counts), certain))
    return [own for own, _ in gathered], all(certain for _, certain in gathered)


def require_equal_lengths(counts: Mapping[int, Sequence[float]], data: str, limit: str) -> None:
    """Raise if ranks have different numbers of batches; ``counts`` has those of each loader by rank.

    Raises:
        DataError: naming the ranks.
    """
    if len({tuple(count) for count in counts.values()}) > 1:
        raise uneven_error(data, limit, [(rank, DataState.ENDED, int(sum(count))) for rank, count in counts.items()])


def _streams(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)

"""Numbers of batches of loaders, and checks of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.lightning.streams.end_of_data import DataState, uneven_error

STREAM = float("inf")
"""Number of batches of data without a known length."""


def are_certain(counts: Sequence[float], loaders: Any) -> bool:
    """True if the numbers of batches are certain; a stream may end before its limit, or before its length.

    Args:
        counts: numbers of batches, of each loader or of all together.
        loaders: a loader, or lists and mappings of loaders.
    """
    return STREAM not in counts and not any(_streams(loader) for loader in CombinedLoader(loaders).flattened)


def require_equal_lengths(counts: Mapping[int, Sequence[float]], data: str, limit: str) -> None:
    """Raise if ranks have different numbers of batches.

    Args:
        counts: numbers of batches of each loader, by rank.
        data: description of the data: ``"training data"``.
        limit: argument of the Trainer that limits the batches.

    Raises:
        DataError: naming the ranks.
    """
    if len({tuple(count) for count in counts.values()}) > 1:
        raise uneven_error(data, limit, [(rank, DataState.ENDED, int(sum(count))) for rank, count in counts.items()])


def _streams(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)

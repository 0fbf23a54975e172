"""Numbers of batches of loaders, and if they can be relied on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_megatron.lightning.streams.vote import Next, uneven

STREAM = float("inf")
"""Number of batches of data that do not say how many they are."""


def are_certain(counts: Sequence[float], loaders: Any) -> bool:
    """True if batches are as many as they are said to be; a stream may end before its limit, or before its length.

    Args:
        counts: of batches, of each loader or of all together.
        loaders: one, or lists and mappings of them.
    """
    return STREAM not in counts and not any(_streams(loader) for loader in _leaves(loaders))


def refuse_uneven(counts: Mapping[int, Sequence[float]], data: str, limit: str) -> None:
    """Refuse ranks that have different numbers of batches.

    Args:
        counts: by rank, for each loader.
        data: in words: ``"training data"``.
        limit: argument of the Trainer that limits them.

    Raises:
        DataError: naming the ranks.
    """
    if len({tuple(count) for count in counts.values()}) > 1:
        raise uneven(data, limit, [(rank, Next.NOTHING, int(sum(count))) for rank, count in counts.items()])


def _leaves(loaders: Any) -> Iterator[Any]:
    """Loaders in a collection; Lightning takes any list for one."""
    if isinstance(loaders, Mapping | list | tuple):
        for loader in loaders.values() if isinstance(loaders, Mapping) else loaders:
            yield from _leaves(loader)
    else:
        yield loaders


def _streams(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)

"""DataLoader that counts the batches the training loop has consumed, and can resume after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from torch.random import fork_rng
from torch.utils.data import DataLoader, Dataset, SequentialSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from lightning_megatron.data.loading.cut_files import check_files
from lightning_megatron.data.sampler import MegatronSampler


class Position(Protocol):
    """Position in an epoch.

    Attributes:
        consumed_samples: samples of this epoch that all replicas together have consumed.
    """

    @property
    def consumed_samples(self) -> int: ...  # noqa: D102

    def advance(self) -> None:
        """Count a batch that the training loop has consumed."""

    def state_dict(self) -> dict[str, int]:
        """Position, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position at which the next iterator begins."""


class CountingDataLoader(DataLoader[Any]):
    """DataLoader that counts the batches it *yields*, not those its workers prefetch.

    Lightning stores ``state_dict()`` of such a loader in every checkpoint and restores it on resume. It then continues
    its own ``batch_idx`` and ends the epoch after ``len(loader)`` batches *including* those before the resume.
    So ``len`` stays that of the whole epoch, while the first iteration after :meth:`load_state_dict` yields the rest.

    Attributes:
        position: position in the epoch.
        before_rest: called before the first batch of an epoch that was interrupted.
    """

    position: Position
    before_rest: Callable[[], None] = staticmethod(lambda: None)

    def __iter__(self) -> Any:
        """Batches of this epoch; the iterator reads its position when its first batch is requested."""
        return _CountingIterator(self)

    def iterate(self) -> Iterator[Any]:
        """Torch's own iterator, which prefetches at once and counts nothing."""
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        """Position, equal on all ranks: ``epoch`` and ``consumed_samples``."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position at which the next iterator begins."""
        self.position.load_state_dict(state)


class ResumableDataLoader(CountingDataLoader):
    """DataLoader over a :class:`MegatronSampler`, which resumes in the middle of an epoch.

    ``batch_idx`` counts batches. A resume with another dp size continues at the same global sample, but ``batch_idx``
    is right only if ``batch_size * dp_size`` is unchanged or the count is converted (``MegatronDataModule`` does
    that).

    Args:
        dataset: map-style data set.
        batch_sampler: sampler, which holds the position.
        **kwargs: arguments of ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory``, ``collate_fn``, ...
    """

    position: MegatronSampler

    def __init__(self, dataset: Dataset[Any], *, batch_sampler: MegatronSampler, **kwargs: Any) -> None:
        kwargs.setdefault("collate_fn", partial(_batch, dataset))
        super().__init__(dataset, batch_sampler=batch_sampler, **kwargs)
        self.position = batch_sampler.sampler
        # torch fills ``sampler`` with a placeholder that nothing reads. Lightning looks there to see whether it must
        # shard the data itself, and for ``set_epoch``. (DataLoader forbids the assignment, hence ``object``.)
        kind = _AlreadySharded if self.position.shuffles else _AlreadyShardedInOrder
        object.__setattr__(self, "sampler", kind(self.position))


def _batch(dataset: Dataset[Any], samples: list[Any]) -> Any:
    """A batch of samples; without samples, a batch of no rows with the keys and shapes of any other."""
    batch = default_collate(samples or [dataset[0]])
    return batch if samples else {name: value[:0] for name, value in batch.items()}


class _CountingIterator(Iterator[Any]):
    """Iterator that starts torch's iterator at the first ``next``.

    Lightning makes the iterator of the first epoch before it says which epoch that is and, in some hook orders, before
    it restores the loader's state. Torch's iterator begins to prefetch when it is made: too early.
    """

    def __init__(self, loader: CountingDataLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        try:
            batch = next(self._batches)
        except RuntimeError:  # a worker that reads past the end of a file dies without a message
            check_files(self._loader.dataset)
            raise
        self._loader.position.advance()
        return batch

    def _begin(self) -> Iterator[Any]:
        if not self._loader.position.consumed_samples:
            return self._loader.iterate()
        self._loader.before_rest()
        with fork_rng(devices=()):  # torch's iterator draws a seed, which an uninterrupted run did not draw here
            return self._loader.iterate()

    def __len__(self) -> int:
        return len(self._loader)

    def __getstate__(self) -> dict[str, Any]:
        return {"_loader": self._loader, "_batches": None}  # worker processes cannot be copied


class _AlreadySharded(DistributedSampler[Any]):
    """Sampler that tells Lightning that the data are sharded over ranks; passes ``set_epoch`` on."""

    def __init__(self, position: MegatronSampler) -> None:
        self.position = position
        self.num_replicas, self.rank = position.dp_size, position.dp_rank
        self.shuffle = False  # for Lightning, which would warn of shuffled validation data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.position)

    def __len__(self) -> int:
        return len(self.position)

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)


class _AlreadyShardedInOrder(_AlreadySharded, SequentialSampler):
    """Sampler that also tells Lightning that every epoch has the same order, as ``overfit_batches`` requires."""

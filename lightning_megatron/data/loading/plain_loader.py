"""Plain DataLoaders that go on in the middle of an epoch: their samples are skipped, not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from lightning_megatron.data.loading.resumable_loader import CountingDataLoader

_STATE = ("epoch", "consumed_samples", "global_batch_size", "epochs_ahead")


class EpochPosition(Sampler[int]):
    """Samples of one replica in the order of another sampler, from the restored position on in the first epoch.

    The position counts samples of all replicas, so another number of replicas goes on at the same one.

    Args:
        order: order of an epoch, which must follow from the epoch's number alone.
        batch_size: samples of one batch of one replica.

    Attributes:
        consumed_samples: samples of this epoch that all replicas together have consumed.
    """

    def __init__(self, order: Sampler[int], batch_size: int) -> None:
        self.order: Sampler[int] = order.order if isinstance(order, EpochPosition) else order
        self._replicas = getattr(self.order, "num_replicas", 1)
        self._global_batch_size = batch_size * self._replicas
        self._epoch = self._start = self.consumed_samples = 0
        self._ahead = 0  # Lightning's number of the epoch minus ours
        self._saved_batch_size: int | None = None

    def __len__(self) -> int:
        """Samples of a whole epoch of this replica."""
        return len(self.order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        """Samples from the restored position, the first time after :meth:`load_state_dict`; else of a whole epoch."""
        self.consumed_samples, self._start = self._start, 0
        return islice(iter(self.order), self.consumed_samples // self._replicas, None)

    @property
    def is_restored(self) -> bool:
        """True if a checkpoint had a position."""
        return self._saved_batch_size is not None

    def advance(self) -> None:
        """Count a batch that the training loop has consumed."""
        self.consumed_samples += self._global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position restored for this epoch is kept, one of another epoch is dropped."""
        if epoch - self._ahead != self._epoch:
            self._epoch, self.consumed_samples, self._start = epoch - self._ahead, 0, 0
        if isinstance(self.order, DistributedSampler):
            self.order.set_epoch(self._epoch)

    def state_dict(self) -> dict[str, int]:
        """Position, equal on all ranks."""
        state = (self._epoch, self.consumed_samples, self._global_batch_size, self._ahead)
        return dict(zip(_STATE, state, strict=True))

    @staticmethod
    def is_state(state: Any) -> bool:
        """True if an object has the entries of :meth:`state_dict`."""
        return isinstance(state, dict) and state.keys() == set(_STATE)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position at which the next iterator begins."""
        self._epoch, self._start = state["epoch"], state["consumed_samples"]
        self.consumed_samples, self._ahead = self._start, state["epochs_ahead"]
        self._saved_batch_size = state["global_batch_size"]

    def agree_on_batches(self, epoch: int, batches: int, in_epoch: int) -> int:
        """Compare the restored position with Lightning's number of batches.

        A checkpoint of stock Lightning has no position. This epoch then reads its first batches again, as in Lightning.
        Lightning counts an epoch that ``max_steps`` cut off as done, and then reads as many batches as were left of it
        in an epoch of the next number. Here these are the ones that were left.

        Args:
            epoch: epoch that is resumed.
            batches: batches of it that the run before consumed.
            in_epoch: batches of the whole epoch.

        Returns:
            The number of batches, converted if the run before had another global batch size.
        """
        size = self._global_batch_size
        if self._saved_batch_size is None:
            return batches
        left = epoch - self._ahead == self._epoch + 1 and batches * self._saved_batch_size == self._start
        self._ahead += left and batches < in_epoch
        same = epoch - self._ahead != self._epoch or self._saved_batch_size == size
        return batches if same else self.consumed_samples // size


class PlainDataLoader(CountingDataLoader):
    """A user's plain ``DataLoader`` that goes on where a checkpoint was saved; see :func:`resumable`."""

    position: EpochPosition


def resumable(loader: Any, before_rest: Callable[[], None]) -> Any:
    """A loader with the same attributes that can be resumed in the middle of an epoch.

    Args:
        loader: what the user has made.
        before_rest: called before the first batch of an epoch that was interrupted.

    Returns:
        The loader itself if it is of another class than torch's, or if its order does not follow from the epoch alone.
    """
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return loader
    batches, order = loader.batch_sampler, cast("Sampler[int]", loader.batch_sampler.sampler)
    # No subclass: Lightning's for several ranks may wrap a sampler that draws anew in each epoch.
    if type(order) not in (SequentialSampler, DistributedSampler, EpochPosition):
        return loader
    batches.sampler = position = EpochPosition(order, batches.batch_size)
    found = PlainDataLoader.__new__(PlainDataLoader)
    vars(found).update(vars(loader), position=position, before_rest=before_rest)
    return found

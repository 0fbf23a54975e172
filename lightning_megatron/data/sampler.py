"""Sampler of a data-parallel rank, with an order that does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.errors import Problem, raise_if_any


class MegatronSampler(Sampler[list[int]]):
    """Batches of one data-parallel rank, as a ``batch_sampler`` of a DataLoader.

    Global batch ``k`` of an epoch is samples ``[k * G, (k + 1) * G)`` of the epoch's order, ``G = batch_size *
    dp_size``, and rank ``r`` takes its ``r``-th ``batch_size`` of them. So the global batches depend on ``G`` alone,
    and a position is one number, the samples that all ranks together consumed; any number of ranks can resume from it.

    The loader counts the batches, since it knows which were consumed and which its workers only prefetched: see
    :class:`~lightning_megatron.data.loading.resumable_loader.ResumableDataLoader`.

    Args:
        num_samples_total: samples of the data set.
        batch_size: samples of one batch of one rank; or the ramp of the global batch, in the only epoch of a run.
        dp_rank: this rank on the dp axis.
        dp_size: ranks of the dp axis.
        shuffle: draw a permutation for each epoch from ``seed + epoch``; else the order of the data set.
        seed: see ``shuffle``.
        drop_last: leave out the samples that do not fill a global batch; else the last one is filled, since ranks must
            have equally many batches.
        fill: samples that the last batch is filled with: ``"repeat"``, the first samples of the epoch; ``"even"``, as
            few of them as give each rank equally many; or ``"short"``, none at all: the ranks share what is left, and
            where there are too few, some have no sample.

    Raises:
        ConfigError: if the sizes cannot work, or with ``drop_last`` make no batch.
    """

    def __init__(
        self,
        num_samples_total: int,
        *,
        batch_size: int | BatchRamp,
        dp_rank: int = 0,
        dp_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        fill: Literal["repeat", "even", "short"] = "repeat",
    ) -> None:
        problems = []
        self._ramp: BatchRamp | None = None
        if isinstance(batch_size, BatchRamp):
            self._ramp, batch_size = batch_size, max(1, batch_size.final // max(1, dp_size))
            if any(size % max(1, dp_size) for size in (self._ramp.start, self._ramp.increment)):
                reason = f"its global batches do not split over dp {dp_size}"
                problems.append(Problem("rampup_batch_size", (self._ramp.start, self._ramp.increment), reason))
        if batch_size < 1:
            problems.append(Problem("batch_size", batch_size, "a batch has at least 1 sample", (1,)))
        if not 0 <= dp_rank < dp_size:
            problems.append(Problem("dp_rank", dp_rank, f"must be in 0..{dp_size - 1} where dp={dp_size}"))
        if fill not in ("repeat", "even", "short"):
            problems.append(Problem("fill", fill, "no such way to fill the last batch", ("repeat", "even", "short")))
        if num_samples_total < 1:
            problems.append(Problem("num_samples_total", num_samples_total, "there is nothing to sample"))
        first = batch_size if self._ramp is None else self._ramp.start // max(1, dp_size)
        if drop_last and not problems and num_samples_total < first * dp_size:
            reason = f"{num_samples_total} samples do not fill one global batch of {first} x dp {dp_size}"
            problems.append(Problem("batch_size", batch_size, f"{reason}; lower it"))
        raise_if_any(problems)
        # Lightning takes an object with both ``batch_size`` and ``drop_last`` for a plain BatchSampler and may
        # create it again with other arguments. Hence the second one is private.
        self.batch_size = batch_size
        self.num_samples_total = num_samples_total
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._fill = fill
        self._epoch = 0
        self._consumed = 0
        self._last = range(0)
        self._resuming = False
        self._unfinished = False
        self._ahead = 0  # Lightning's epoch number minus our own
        # This sampler: Lightning looks for ``set_epoch`` in ``loader.batch_sampler.sampler``. An attribute, because the
        # wrapper that it puts around batch samplers for prediction copies attributes, and nothing else.
        self.sampler = self

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together take in one batch, after the ramp if there is one."""
        return self.batch_size * self.dp_size

    def global_batch_at(self, consumed: int) -> int:
        """Samples that all ranks together take in the batch after ``consumed`` samples of an epoch."""
        size = self.global_batch_size if self._ramp is None else self._ramp.size_at(consumed)
        if self._drop_last or self._fill == "repeat":
            return size
        left = self.num_samples_total - consumed
        if self._fill == "even":
            return min(size, -(-left // self.dp_size) * self.dp_size)
        size = min(size, left)
        missing = self.dp_size - (left - size)  # for one sample on each rank in the batch after this one
        return size - missing if size < left and 0 < missing <= size - self.dp_size else size

    def consumed_after(self, batches: int) -> int:
        """Samples that all ranks together have consumed after a number of batches from the first epoch on."""
        epochs, rest = divmod(batches, len(self))
        consumed = rest * self.global_batch_size if self._ramp is None else self._ramp.consumed_after(rest)
        return epochs * self.num_samples_total + consumed

    @property
    def shuffles(self) -> bool:
        """True if each epoch has an order of its own."""
        return self._shuffle

    @property
    def epoch(self) -> int:
        """Epoch whose order is read."""
        return self._epoch

    @property
    def consumed_samples(self) -> int:
        """Samples of this epoch that all ranks together have consumed."""
        return self._consumed

    @property
    def is_restored(self) -> bool:
        """True from a restored position until an epoch begins, here or elsewhere."""
        return self._resuming

    def __len__(self) -> int:
        """Number of batches of a whole epoch, at any position."""
        return self._batches(0)

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from the restored position, the first time after :meth:`load_state_dict`; else of a whole epoch."""
        start = self.start()
        order = self._order()
        for _ in range(self._batches(start)):
            size = self.global_batch_at(start)
            first, end = (start + size * rank // self.dp_size for rank in (self.dp_rank, self.dp_rank + 1))
            yield [int(order[i % self.num_samples_total]) for i in range(first, end)]
            start += size

    def start(self) -> int:
        """Begin an epoch or continue a restored one; returns the number of its samples that are already consumed."""
        if not self._resuming:
            self._consumed = 0
        self._resuming = self._unfinished = False
        return self._consumed

    def advance(self, batches: int = 1) -> None:
        """Count batches that the training loop has consumed."""
        before = self._consumed
        for _ in range(batches):
            after = self._consumed + self.global_batch_at(self._consumed)
            self._consumed = min(after, self.num_samples_total)
        self._last = range(before, self._consumed)

    @property
    def last_batch(self) -> range:
        """Positions in the epoch's order of the last samples that all ranks together have consumed."""
        return self._last

    def samples_at(self, places: range) -> list[int]:
        """Numbers in the data set of the samples at some positions of this epoch's order."""
        order = self._order()
        return [int(order[place]) for place in places]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. A position restored for this epoch is kept, one of another epoch is dropped.

        An epoch that is known to be unfinished is read to its end, whatever ``epoch`` is: Lightning counts an epoch
        that ``max_steps`` cut off as done. The epochs after it keep the orders that they would have had.
        """
        if self._unfinished:
            self._ahead = epoch - self._epoch
            return
        self._ahead *= epoch >= self._ahead  # else another run has begun
        if epoch - self._ahead != self._epoch:
            self._epoch = epoch - self._ahead
            self._consumed = 0
            self._resuming = False

    def state_dict(self) -> dict[str, int]:
        """Position, equal on every rank and for any number of ranks: ``epoch`` and ``consumed_samples``."""
        ahead = {"epochs_ahead": self._ahead} if self._ahead else {}
        return {"epoch": self._epoch, "consumed_samples": self._consumed, **ahead}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the position; the end of an epoch is the beginning of the next.

        Args:
            state: result of :meth:`state_dict`. ``unfinished`` may be True if the epoch was left before its end, and
                not shortened by a limit that holds in each epoch.
        """
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed_samples"])
        self._unfinished = bool(state.get("unfinished", self._unfinished))
        self._ahead = int(state.get("epochs_ahead", 0))
        if not self._batches(self._consumed):
            self._epoch, self._consumed, self._unfinished = self._epoch + 1, 0, False
        self._resuming = True

    def _batches(self, start: int) -> int:
        left = max(0, self.num_samples_total - start)
        if self._ramp is not None:
            whole = self._ramp.batches(start, self.num_samples_total)
            return whole if self._drop_last else whole + (self._ramp.consumed_after(whole, start) < start + left)
        return left // self.global_batch_size if self._drop_last else -(-left // self.global_batch_size)

    def _order(self) -> torch.Tensor | range:
        return self._permutation() if self._shuffle else range(self.num_samples_total)

    def _permutation(self) -> torch.Tensor:
        return torch.randperm(self.num_samples_total, generator=torch.Generator().manual_seed(self._seed + self._epoch))


class ConsecutiveEpochs(MegatronSampler):
    """Sampler of a data set that holds several epochs, one behind the other.

    Args:
        num_samples_total: samples of one epoch.
        epochs: number of epochs; after the last one the first follows again. Each is shuffled by ``seed + epoch``.
        **options: further arguments of :class:`MegatronSampler`.
    """

    def __init__(self, num_samples_total: int, *, epochs: int, **options: Any) -> None:
        super().__init__(num_samples_total, **options)
        self._epochs = epochs

    def _order(self) -> torch.Tensor | range:
        first = self._epoch % self._epochs * self.num_samples_total
        if self._epoch >= self._epochs:
            return first + self._permutation()
        return range(first, first + self.num_samples_total)

"""A global batch that grows at the beginning of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_megatron.errors import Problem, is_whole, raise_if_any


@dataclass(frozen=True)
class BatchRamp:
    """Global batch by the number of samples that were consumed before it: Megatron-LM's ``--rampup-batch-size``.

    From ``start`` it grows by ``increment`` in steps of equally many samples, until ``samples`` were consumed.

    Attributes:
        start: samples of the first global batch.
        increment: samples by which it grows at a time.
        samples: samples after which it has its final size.
        final: samples of a global batch after that.

    Raises:
        ConfigError: for sizes that cannot work, under the argument ``rampup_batch_size``.
    """

    start: int
    increment: int
    samples: int
    final: int

    def __post_init__(self) -> None:
        raise_if_any(self._problems())

    def _problems(self) -> list[Problem]:
        name, given = "rampup_batch_size", (self.start, self.increment, self.samples)
        if not all(is_whole(value, at_least=1) for value in given):
            reason = "needs three whole numbers of at least 1: first global batch, increment, samples of the ramp"
            return [Problem(name, given, reason)]
        if self.start > self.final:
            reason = f"begins with {self.start} samples, and the global batch it grows to has {self.final}"
            return [Problem(name, given, reason, ((self.final, *given[1:]),))]
        if over := (self.final - self.start) % self.increment:
            reason = f"{self.start} + steps of {self.increment} do not reach the global batch of {self.final}"
            near = [(begin, *given[1:]) for begin in (self.start + over, self.start + over - self.increment)]
            return [Problem(name, given, reason, tuple(n for n in near if n[0] >= 1))]
        return []

    @property
    def sizes(self) -> range:
        """Global batches, from the first to the final one."""
        return range(self.start, self.final + 1, self.increment)

    @property
    def _stride(self) -> float:
        """Samples of one step of the ramp, in floating point as Megatron-LM divides them."""
        return self.samples / (len(self.sizes) - 1)

    def size_at(self, consumed: int) -> int:
        """Samples of the global batch that comes after ``consumed`` samples."""
        if consumed > self.samples or self.start == self.final:
            return self.final
        return self.start + int(consumed / self._stride) * self.increment

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Runs of equal global batches that fit between two positions, each as (size, number of batches).

        Args:
            begin: samples consumed before the first batch.
            end: position that the last batch must not exceed.
        """
        while (fit := (end - begin) // (size := self.size_at(begin))) > 0:
            if size < self.final:
                next_step = ((size - self.start) // self.increment + 1) * self._stride
                fit = min(fit, max(1, int((next_step - begin) / size)))
            elif begin <= self.samples:
                fit = 1  # the division may round the last step of the ramp to either side
            yield size, fit
            begin += size * fit

    def batches(self, begin: int, end: int) -> int:
        """Number of whole global batches between two positions."""
        return sum(number for _, number in self.runs(begin, end))

    def consumed_after(self, batches: int, begin: int = 0) -> int:
        """Position after a number of batches."""
        # With ``batches`` final batches to come, the end is far enough for all of them.
        for size, number in self.runs(begin, begin + batches * self.final):
            taken = min(number, batches)
            begin, batches = begin + size * taken, batches - taken
        return begin

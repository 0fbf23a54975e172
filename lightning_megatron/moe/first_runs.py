"""Forwards of a router that run again in the backward: what the first run and its repetition share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.rng import RNGStreams

T = TypeVar("T")

_MOST_RUNS = 4096  # far more than forwards that wait for their backward


@dataclass
class _Run:
    """A forward, from its first run on.

    Attributes:
        is_counted: True once it has run with gradients, and so its statistics are counted.
        result: result of :meth:`FirstRuns.once`.
    """

    is_counted: bool = False
    result: Any = None


class FirstRuns:
    """Tells a forward that is recomputed in a backward, by whatever kind of checkpoint, from a new one.

    Each forward draws a number. Checkpoints restore the default generators, so the same number in a backward means the
    same forward. Torch's reentrant checkpoint runs a forward without gradients first; then the repetition counts.

    Attributes:
        counts: True while the statistics of a forward count.
    """

    def __init__(self, rng: RNGStreams) -> None:
        self.counts = True
        self._rng = rng
        self._runs: dict[int, _Run] = {}
        self._run: _Run | None = None

    @contextmanager
    def forward(self, learns: bool) -> Iterator[None]:
        """A forward in training; ``learns`` is True if gradients are recorded."""
        before, run = (self._run, self.counts), self._begin()
        self._run, self.counts = run, learns and not run.is_counted
        run.is_counted |= learns
        try:
            yield
        finally:
            self._run, self.counts = before

    def _begin(self) -> _Run:
        number = self._rng.draw()
        if not self._rng.replaying:
            self._runs[number] = _Run()
            if len(self._runs) > _MOST_RUNS:
                del self._runs[next(iter(self._runs))]
        elif number not in self._runs:
            reason = (
                "torch.utils.checkpoint runs a layer of experts again with other random numbers, and its tokens would"
                " count twice: leave preserve_rng_state out, or pass recompute to MegatronStrategy instead"
            )
            raise_if_any([Problem("preserve_rng_state", False, reason, (True,))])
        return self._runs[number]

    @torch.compiler.disable  # a new result in each forward would compile a new graph
    def once(self, function: Callable[[], T]) -> T:
        """Result of ``function``; where a forward is repeated, the result that it had in the run that counted."""
        if self._run is None:
            return function()
        if self.counts:
            self._run.result = function()
        result: T = self._run.result
        return result

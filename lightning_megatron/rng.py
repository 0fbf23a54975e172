"""Random streams of one rank.

Outside tensor-parallel regions every tp rank must draw the same dropout mask, inside they must differ (Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3). Context-parallel ranks hold other tokens and must differ in both. Draws
that all ranks share come from torch's default generator, which Lightning seeds equally; the others from separate
streams that are swapped in within a ``with`` block. Pipeline stages have different layers, so layers do not draw from
the default generator there: only data and user code do, and these must draw the same on all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from lightning_megatron import device as devices

T = TypeVar("T")

# 2718 is Megatron-LM's; all are far enough apart that no two coordinates of a real job share a seed.
_OFFSETS = {"tensor": 2718, "context": 314, "stage": 57721}
_CONTEXT_STRIDE = 1000
_STAGE_STRIDE = 100_000


class RNGStreams:
    """Default random stream of a device, and more that differ between ranks.

    Attributes:
        replaying: True while a forward is recomputed for its gradients: statistics must not be counted again.

    Args:
        device: device whose generator is swapped.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.replaying = self._is_pipeline = False
        self._records: list[list[Any]] = []  # results in the recomputed functions that now run, the outermost first
        self._results: Iterator[Any] = iter(())  # those of the first run of the function that is now recomputed
        self._states: dict[str, torch.Tensor] = {}

    def seed(self, seed: int, *, tp_rank: int, pp_rank: int = 0, cp_rank: int = 0, pp_size: int = 1) -> None:
        """Start the streams that differ between ranks; the default stream keeps its own seed."""
        seed += _CONTEXT_STRIDE * cp_rank + _STAGE_STRIDE * pp_rank
        seeds = {name: seed + offset + tp_rank * (name == "tensor") for name, offset in _OFFSETS.items()}
        self._is_pipeline = pp_size > 1
        self._states = {name: devices.seeded_rng_state(value, self.device) for name, value in seeds.items()}

    def tensor_parallel(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs over tp and cp (the default one if never seeded)."""
        return self._swapped("tensor") if self._states else nullcontext()

    def context_parallel(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs over cp and not over tp (the default one if never seeded)."""
        return self._swapped("context") if self._states else nullcontext()

    def stage(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs over pp alone (the default one without a pipeline)."""
        return self._swapped("stage") if self._is_pipeline else nullcontext()

    @contextmanager
    def _swapped(self, name: str) -> Iterator[None]:
        default = devices.rng_state(self.device)
        devices.set_rng_state(self._states[name], self.device)
        try:
            yield
        finally:
            self._states[name] = devices.rng_state(self.device)
            devices.set_rng_state(default, self.device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All streams, as byte tensors."""
        return {"default": devices.rng_state(self.device), **self._states}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue all streams where :meth:`state_dict` was taken."""
        devices.set_rng_state(state["default"].cpu(), self.device)
        self._states |= {name: stream.cpu() for name, stream in state.items() if name != "default"}

    @torch.compiler.disable  # the record is new in each forward, and would compile a new graph
    def once(self, function: Callable[[], T]) -> T:
        """Result of ``function``; where a forward is recomputed, the result that it had in the first run."""
        result: T = next(self._results) if self.replaying else function()
        for record in self._records:
            record.append(result)
        return result

    def replay_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` for ``torch.utils.checkpoint``: the recomputation draws what the first forward drew.

        Torch rewinds the default generator itself, but not the others. Results of :meth:`once` are those of the same
        function's first run, in whatever order functions are recomputed.
        """
        record: list[Any] = []
        return self._recorded(record), _Rewound(self, dict(self._states), record)

    @contextmanager
    def _recorded(self, record: list[Any]) -> Iterator[None]:
        self._records.append(record)
        try:
            yield
        finally:
            self._records.pop()


class _Rewound(AbstractContextManager[None]):
    """Streams and results of a first run; entered again in each backward through a retained graph."""

    def __init__(self, rng: RNGStreams, states: dict[str, torch.Tensor], record: list[Any]) -> None:
        self._rng, self._states, self._record = rng, states, record

    def __enter__(self) -> None:
        again = {"_states": dict(self._states), "replaying": True, "_records": [], "_results": iter(self._record)}
        self._before = {name: getattr(self._rng, name) for name in again}
        vars(self._rng).update(again)

    def __exit__(self, *error: object) -> None:
        vars(self._rng).update(self._before)

"""Random streams of one rank.

Outside tensor-parallel regions every tp rank must draw the same dropout mask, inside they must differ
(Megatron-LM, https://arxiv.org/abs/1909.08053, section 3). The first kind uses torch's default generator, which
Lightning seeds alike on all ranks; the second a stream of its own that is swapped in for the time of a ``with``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lightning_megatron import device as devices

# Megatron-LM's offsets: far enough apart that no two coordinates of a real job share a seed.
_TENSOR_OFFSET = 2718
_STAGE_STRIDE = 100_000


class RNGStreams:
    """The default random stream of a device and a second one that differs between tensor-parallel ranks.

    Attributes:
        replaying: a forward is running for the second time, for its gradients: what it counts has been counted.

    Args:
        device: whose generator is swapped.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.replaying = False
        self._tensor_state: torch.Tensor | None = None

    def seed(self, seed: int, *, tp_rank: int, pp_rank: int = 0) -> None:
        """Start the tensor-parallel stream; the default stream is left to whoever seeded it."""
        seed += _TENSOR_OFFSET + tp_rank + _STAGE_STRIDE * pp_rank
        self._tensor_state = devices.seeded_rng_state(seed, self.device)

    def tensor_parallel(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs between tensor-parallel ranks (the default one if never seeded)."""
        return nullcontext() if self._tensor_state is None else self._swapped()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        assert self._tensor_state is not None
        default = devices.rng_state(self.device)
        devices.set_rng_state(self._tensor_state, self.device)
        try:
            yield
        finally:
            self._tensor_state = devices.rng_state(self.device)
            devices.set_rng_state(default, self.device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both streams, as byte tensors."""
        state = {"default": devices.rng_state(self.device)}
        if self._tensor_state is not None:
            state["tensor"] = self._tensor_state
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue both streams where :meth:`state_dict` was taken."""
        devices.set_rng_state(state["default"].cpu(), self.device)
        self._tensor_state = state["tensor"].cpu() if "tensor" in state else None

    def replay_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` for ``torch.utils.checkpoint``: the recomputation draws what the first forward drew.

        Torch rewinds the default generator itself; it does not know of the second stream.
        """
        state = self._tensor_state
        return nullcontext(), self._rewound(state)

    @contextmanager
    def _rewound(self, state: torch.Tensor | None) -> Iterator[None]:
        before = self._tensor_state, self.replaying
        self._tensor_state, self.replaying = state, True
        try:
            yield
        finally:
            self._tensor_state, self.replaying = before

"""Random streams of one rank.

Outside tensor-parallel regions every tp rank must draw the same dropout mask, inside they must differ (Megatron-LM,
https://arxiv.org/abs/1909.08053, section 3). Context-parallel ranks hold other tokens and must differ in both. Draws
that all ranks share come from torch's default generator, which Lightning seeds equally. For the others a ``with`` block
seeds the generator of the device anew, by a number that it draws from the host's default generator and by the place of
the rank, and puts it back in the end.

So the default generators decide every draw. Whatever restores them, such as ``torch.utils.checkpoint`` in a backward,
gets the same masks again, and no stream has a state that it would have to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lightning_megatron import device as devices

# 2718 is Megatron-LM's; all are far enough apart that no two coordinates of a real job share a seed.
_OFFSETS = {"tensor": 2718, "context": 314}
_CONTEXT_STRIDE = 1000


class RNGStreams:
    """Default random stream of a device, and more that differ between ranks.

    Args:
        device: device of the generator that is seeded.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._places: dict[str, int] = {}

    @property
    def replaying(self) -> bool:
        """True while a forward is recomputed in a backward: statistics must not be counted again."""
        return torch._C._current_graph_task_id() >= 0

    def place(self, *, tp_rank: int, cp_rank: int = 0) -> None:
        """Let streams differ between ranks from now on, and checkpoints of users preserve the device's generator."""
        devices.initialize_generators(self.device)
        place = {"tensor": _CONTEXT_STRIDE * cp_rank + tp_rank, "context": _CONTEXT_STRIDE * cp_rank}
        self._places = {name: _OFFSETS[name] + number for name, number in place.items()}

    def tensor_parallel(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs over tp and cp (the default one without a place)."""
        return self._seeded("tensor") if self._places else nullcontext()

    def context_parallel(self) -> AbstractContextManager[None]:
        """Draw from the stream that differs over cp and not over tp (the default one without a place)."""
        return self._seeded("context") if self._places else nullcontext()

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        seed = self.draw() + self._places[name]
        default = devices.rng_state(self.device)
        devices.seed_generator(seed, self.device)
        try:
            yield
        finally:
            devices.set_rng_state(default, self.device)

    @torch.compiler.disable  # a number of the host
    def draw(self) -> int:
        """A number of the host's default generator, so large that it comes again only where a forward is repeated."""
        return int(torch.randint(1 << 61, (), device="cpu"))

    def begin_stage(self, stage: int) -> None:
        """Let a pipeline stage draw other numbers than those before it, from here to the end of its micro-batch."""
        seed = self.draw() + stage
        for device in {torch.device("cpu"), self.device}:
            devices.seed_generator(seed, device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of the device's generator, as a byte tensor."""
        return {"default": devices.rng_state(self.device)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        devices.set_rng_state(state["default"].cpu(), self.device)

"""A say in every optimizer step, between complete gradients and the optimizer."""

from __future__ import annotations

from typing import Protocol


class StepGate(Protocol):
    """Decides on all ranks alike whether the optimizer may use the gradients of a step."""

    def admits(self, overflow: bool) -> bool:
        """True if the step may be taken; asked once a step, on all ranks, after hooks and clipping.

        A step that is not taken leaves parameters, optimizer state, the loss scale and what modules learn from steps
        (balances of experts, fp8 scales) as they are. Lightning counts it, and learning-rate schedulers move on.

        Args:
            overflow: whether gradients have overflowed in half precision; such a step is not taken anyway.
        """
        ...

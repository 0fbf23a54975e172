"""The interface that lets a callback skip optimizer steps."""

from __future__ import annotations

from typing import Protocol


class StepGate(Protocol):
    """Decides, equally on all ranks, if the optimizer may use the gradients of a step."""

    def admits(self, overflow: bool) -> bool:
        """True if the step may be taken; asked once a step, on all ranks, after hooks and clipping.

        A skipped step leaves parameters, optimizer state, the loss scale and module state that steps update (expert
        biases, fp8 scales) unchanged. Lightning counts it, and learning-rate schedulers advance.

        Args:
            overflow: True if gradients have overflowed in half precision; such a step is skipped in any case.
        """
        ...

"""Where a model call begins and ends on one stage of a pipeline.

A user's step calls the model as if it were whole. On a stage that is not the first the model begins with the activation
that has arrived; on one that is not the last it ends the step then and there, by raising :class:`StageReached` with the
activation for the next stage. Code before the call runs on every stage, code after it on the last one only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor


@dataclass(frozen=True)
class StageLayers:
    """What one stage builds.

    Attributes:
        stage: global stage number.
        rank: the pipeline rank that holds it.
        chunk: which of the rank's chunks it is.
        layers: global numbers of its layers; may be empty.
        has_embedding: it turns tokens into activations.
        has_loss: it holds the final norm and the head, and computes the loss.
    """

    stage: int
    rank: int
    chunk: int
    layers: range
    has_embedding: bool
    has_loss: bool


@dataclass
class BackwardScale:
    """Factor of a micro-batch's loss in the backward pass: its share of the batch, and the loss scale of fp16.

    What is minimized besides the loss, but hangs on another tensor than the loss, is multiplied with it. A step that
    returns a sum over tokens changes it after its forward, when their number is known.

    Attributes:
        value: the factor; read when backward is there.
    """

    value: float | Tensor = 1.0


class StageReached(BaseException):
    """The part of the model on this stage is done. No error: a ``BaseException``, so that no user's handler stops it.

    Attributes:
        hidden: activation for the next stage.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the model's part on this pipeline stage is done")
        self.hidden = hidden


class StageBoundary:
    """What a model cut into stages asks: which stage runs now, and on what.

    Attributes:
        num_stages: stages of the whole pipeline.
        stage: the stage that runs now; ``None`` outside a schedule.
        hidden: its input activation; ``None`` on the first stage.
        loss_scale: what the loss of this micro-batch is multiplied with before backward.

    Args:
        num_stages: stages of the whole pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.stage: int | None = None
        self.hidden: Tensor | None = None
        self.loss_scale = BackwardScale()

    @contextmanager
    def at(self, stage: int, hidden: Tensor | None, loss_scale: float = 1.0) -> Iterator[BackwardScale]:
        """Let the model's next call be that of ``stage``; gives the scale, which may change until backward."""
        before = self.stage, self.hidden, self.loss_scale
        self.stage, self.hidden, self.loss_scale = stage, hidden, BackwardScale(loss_scale)
        try:
            yield self.loss_scale
        finally:
            self.stage, self.hidden, self.loss_scale = before

    def leave(self, hidden: Tensor) -> NoReturn:
        """End the step here, with the activation for the next stage."""
        raise StageReached(hidden)

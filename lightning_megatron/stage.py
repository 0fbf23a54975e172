"""Begin and end of a model call on one stage of a pipeline.

A user's step calls the model as if it were whole. On every stage but the first, the model begins with the received
activation; on every stage but the last, it ends the step by raising :class:`StageReached` with the activation for the
next stage. Code before the call runs on every stage, code after it on the last one only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StageLayers:
    """Layers of one pipeline stage.

    Attributes:
        stage: global stage number.
        rank: pipeline rank that holds the stage.
        chunk: number of the stage among the rank's model chunks.
        layers: global numbers of its layers; may be empty.
        has_embedding: True if the stage turns tokens into activations.
        has_loss: True if the stage holds the final norm and the head, and computes the loss.
    """

    stage: int
    rank: int
    chunk: int
    layers: range
    has_embedding: bool
    has_loss: bool

    @classmethod
    def whole(cls, num_layers: int) -> StageLayers:
        """A model in one piece: a single stage."""
        return cls(0, 0, 0, range(num_layers), has_embedding=True, has_loss=True)


@dataclass
class BackwardScale:
    """Factor of a micro-batch's loss in the backward pass: its share of the batch, and the loss scale of fp16.

    Auxiliary losses that are attached to another tensor than the loss are multiplied by it. A step that returns a sum
    over tokens changes it after its forward, when the number of tokens is known.

    Attributes:
        value: factor; read during backward.
    """

    value: float | Tensor = 1.0


class StageReached(BaseException):
    """End of the model's part on this stage. A ``BaseException``, so that no ``except Exception`` stops it.

    Attributes:
        hidden: activation for the next stage.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the model's part on this pipeline stage is done")
        self.hidden = hidden


class StageBoundary:
    """Stage that a model's call runs now, its input and its end.

    Attributes:
        num_stages: number of stages of the whole pipeline.
        stage: stage that runs now; ``None`` outside a schedule.
        hidden: input activation of the stage; ``None`` on the first one.
        loss_scale: factor of this micro-batch's loss in the backward pass.
        begin: function that is called with the number of a stage where it takes its input.

    Args:
        num_stages: number of stages of the whole pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.stage: int | None = None
        self.hidden: Tensor | None = None
        self.loss_scale = BackwardScale()
        self.begin: Callable[[int], None] | None = None
        self._is_taken = False

    @contextmanager
    def at(self, stage: int, hidden: Tensor | None, loss_scale: float | Tensor = 1.0) -> Iterator[BackwardScale]:
        """Run ``stage`` in the model's next call; yields the scale, which may change until backward."""
        before = self.stage, self.hidden, self.loss_scale, self._is_taken
        self.stage, self.hidden, self.loss_scale, self._is_taken = stage, hidden, BackwardScale(loss_scale), False
        try:
            yield self.loss_scale
        finally:
            self.stage, self.hidden, self.loss_scale, self._is_taken = before

    def take(self) -> Tensor:
        """The input of the stage, once per step: the stages before this one have run only once.

        Raises:
            RuntimeError: for a second call in the same step.
        """
        if self._is_taken:
            raise RuntimeError(
                "the model is cut into pipeline stages, which run once in a step: call hidden() once and pass its"
                " result to loss() and token_losses(), or use pp=1"
            )
        assert self.stage is not None
        assert self.hidden is not None
        self._is_taken = True
        if self.begin is not None:
            self.begin(self.stage)
        return self.hidden

    def leave(self, hidden: Tensor) -> NoReturn:
        """End the step on this stage, with the activation for the next one."""
        raise StageReached(hidden)

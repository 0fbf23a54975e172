"""A number that is known in the backward pass, for those who must name it in the forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class BackwardScale:
    """Factor of a micro-batch's loss in the backward pass: its share of the batch, and the loss scale of fp16.

    What is minimized besides the loss, but hangs on another tensor than the loss, is multiplied with it. A step that
    returns a sum over tokens changes it after its forward, when their number is known.

    Attributes:
        value: the factor; read when backward is there.
    """

    value: float | Tensor = 1.0

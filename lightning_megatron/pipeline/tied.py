"""Parameters that two stages hold: the embedding, where the output layer of the last stage is tied to the first's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_megatron.comm.collectives import start_all_reduce
from lightning_megatron.mesh import Axis


def sum_tied_gradients(gradients: Mapping[str, Tensor], ends: Axis) -> None:
    """Sum in place the gradients of parameters that both ends of a pipeline hold, so that the copies stay equal.

    Args:
        gradients: accumulated gradients of the tied parameters, by name.
        ends: first and last stage.
    """
    for _, gradient in sorted(gradients.items()):
        gradient.copy_(start_all_reduce(gradient, ends).wait())

"""Parameters that two stages hold: the embedding, where the output layer of the last stage is tied to the first's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from lightning_megatron.comm.collectives import start_all_reduce
from lightning_megatron.mesh import Axis


def sum_tied_gradients(gradients: Sequence[tuple[str, Tensor]], names: Collection[str], ends: Axis) -> None:
    """Sum in place the gradients of parameters that both ends of a pipeline hold, so that the copies stay equal.

    Args:
        gradients: name and accumulated gradient of this rank's parameters.
        names: the tied ones.
        ends: first and last stage; this rank alone if it is neither.
    """
    if ends.size == 1:
        return
    for _, gradient in sorted((item for item in gradients if item[0] in names), key=lambda item: item[0]):
        gradient.copy_(start_all_reduce(gradient, ends).wait())

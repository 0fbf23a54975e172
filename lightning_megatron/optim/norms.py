"""The norm of every parameter's gradient over the whole model, whatever part of it a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.clip import local_norm


def norms_by_name(
    pieces: Iterable[tuple[str, Tensor]], names: Sequence[str], world: Axis, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """L2 norms by name of a parameter, equal on all ranks; all of them call this, and one collective is all it costs.

    Args:
        pieces: gradients that this rank counts, of whole parameters or of parts of them.
        names: of all parameters of the model, in one order on all ranks.
        world: the ranks that hold the model.
        device: where the result lives.
        dtype: of the result.

    Returns:
        A norm for each parameter of which any rank has a gradient.
    """
    place = {name: number for number, name in enumerate(names)}
    table = torch.zeros(2, len(names), dtype=dtype, device=device)  # sums of squares, and whether there are any
    for name, grad in pieces:
        table[0, place[name]] += local_norm(grad).square()
        table[1, place[name]] = 1
    squares, present = all_reduce(table, world)
    return {name: norm for name, norm, has in zip(names, squares.sqrt(), present.tolist(), strict=True) if has}

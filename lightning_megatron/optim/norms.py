"""The norm of every parameter's gradient over the whole model, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.mesh import Axis
from lightning_megatron.optim.clip import local_norm


def norms_by_name(
    grads: Iterable[tuple[str, Tensor]], names: Sequence[str], world: Axis, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """L2 norms by name of the parameter, equal on all ranks. Every rank must call this; it costs one collective.

    Args:
        grads: name and gradient of the parameters, or parts of parameters, that this rank counts.
        names: names of all parameters of the model, in the same order on all ranks.
        world: the ranks that hold the model.
        device: device of the result.
        dtype: dtype of the result.

    Returns:
        A norm for each parameter that has a gradient on any rank.
    """
    place = {name: number for number, name in enumerate(names)}
    table = torch.zeros(2, len(names), dtype=dtype, device=device)  # sums of squares; 1 if there is a gradient
    for name, grad in grads:
        table[0, place[name]] += local_norm(grad).square()
        table[1, place[name]] = 1
    squares, present = all_reduce(table, world)
    return {name: norm for name, norm, has in zip(names, squares.sqrt(), present.tolist(), strict=True) if has}

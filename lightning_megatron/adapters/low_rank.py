"""The two low-rank matrices of an adapter, and the row order of a fused matrix that has several adapted parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.layers.init import normal_, uniform_
from lightning_megatron.params import ParamSpec, ShardRanks


class Cut(NamedTuple):
    """A sharded parameter: the spec of the whole, and the shape of this rank's part."""

    spec: ParamSpec
    shape: tuple[int, ...]


class Matrices(NamedTuple):
    """Parameters of one adapted matrix, as :class:`LowRank` describes them."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None


class LowRank(nn.Module):
    """Parameters of one adapted matrix: ``A`` ``[r, in]``, ``B`` ``[out, r]``, with DoRA magnitudes ``[out]``.

    Those of experts have one more leading dimension. ``A`` is drawn from a uniform distribution, as in PEFT, and ``B``
    is zero. For an embedding, whose ``A`` is ``[V, r]``, ``A`` is zero and ``B`` is drawn from a normal distribution.

    An adapter calls this module to get the parameters, so that its forward pre-hook runs, which waits for values that
    are still being gathered after the optimizer's step.
    """

    def __init__(self, a: Cut, b: Cut, magnitude: Cut | None, ranks: ShardRanks, *, of_embedding: bool = False) -> None:
        super().__init__()
        self._specs = {"lora_A": a.spec, "lora_B": b.spec}
        self.lora_A = nn.Parameter(torch.zeros(a.shape))
        self.lora_B = nn.Parameter(torch.zeros(b.shape))
        self.lora_magnitude: nn.Parameter | None = None
        if magnitude is not None:
            self._specs["lora_magnitude"] = magnitude.spec
            self.lora_magnitude = nn.Parameter(torch.zeros(magnitude.shape))
        if of_embedding:
            normal_(self.lora_B, b.spec, ranks, 1.0)
        else:
            uniform_(self.lora_A, a.spec, ranks, 1 / sqrt(a.spec.global_shape[-1]))

    def forward(self) -> Matrices:
        """The parameters, once they have the values of the last step."""
        return Matrices(self.lora_A, self.lora_B, self.lora_magnitude)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Specs of the parameters by name."""
        return self._specs


@dataclass(frozen=True)
class Rows:
    """Row order of a rank's fused matrix: each group holds the rows of every part, one part after the other.

    Attributes:
        groups: number of groups on this rank.
        widths: number of rows of each part in a group.
    """

    groups: int
    widths: Mapping[str, int]

    def fused(self, parts: Mapping[str, Tensor], dim: int) -> Tensor:
        """Put the rows of the parts in the fused order, along dimension ``dim``; rows of absent parts are zero."""
        if len(self.widths) == 1:
            return next(iter(parts.values()))
        like = next(iter(parts.values()))
        dim = dim % like.ndim

        def rows_of(name: str, width: int) -> Tensor:
            if name in parts:
                return parts[name].unflatten(dim, (self.groups, width))
            return like.new_zeros(*like.shape[:dim], self.groups, width, *like.shape[dim + 1 :])

        return torch.cat([rows_of(*part) for part in self.widths.items()], dim=dim + 1).flatten(dim, dim + 1)

    def of_part(self, name: str, rows: Tensor) -> Tensor:
        """Rows of one part, ``[n, ...]``, out of all rows of the matrix."""
        if len(self.widths) == 1:
            return rows
        place = list(self.widths).index(name)
        groups = rows.unflatten(0, (self.groups, -1))
        return groups.split(list(self.widths.values()), dim=1)[place].flatten(0, 1)


def squared_lengths(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Squared norms ``[out]``, in fp32, of the rows of ``W + s B A``, without computing that matrix.

    Results for slices of the input features add up.

    Args:
        weight: ``[out, in]``.
        a: ``[r, in]``.
        b: ``[out, r]``.
        scale: factor of ``B A``.
    """
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)).square()
    mixed = ((weight @ a.t()).to(squares.dtype) * b).sum(1)
    own = ((b.to(squares.dtype) @ (a @ a.t()).to(squares.dtype)) * b).sum(1)
    return squares + 2 * scale * mixed + scale * scale * own

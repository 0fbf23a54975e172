"""Adapters of experts, over the ranks that hold slices of the same experts.

No matrix of an adapter is replicated over the etp axis: a matrix that the product needs whole is sharded along the
hidden features and gathered for it, and its gradient is reduce-scattered. So gradients, norms and checkpoints treat it
like every other weight of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from lightning_megatron.adapters.low_rank import LowRank, Matrices, Rows
from lightning_megatron.comm.collectives import gather_sequence
from lightning_megatron.mesh import Axis

Product = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""``x_g W_g^T`` for every group of consecutive rows."""


class ExpertsAdapter(nn.Module):
    """Adapter of the two matrices of every expert on this rank.

    Args:
        fc1: parameters of the first matrix by part: ``A`` ``[E, r, H/etp]``, ``B`` ``[E, F/etp, r]``.
        fc2: those of the second: ``A`` ``[E, r, F/etp]``, ``B`` ``[E, H/etp, r]``.
        rows: order of the rows of the first matrix.
        axis: ranks with slices of the same experts.
        scale: factor of the products.
    """

    def __init__(
        self,
        fc1: Mapping[str, LowRank],
        fc2: Mapping[str, LowRank],
        rows: Rows,
        axis: Axis,
        scale: float,
    ) -> None:
        super().__init__()
        for name, part in {**fc1, **fc2}.items():
            self.add_module(name, part)
        self._names = {"fc1": tuple(fc1), "fc2": tuple(fc2)}
        self.rows, self.axis, self.scale = rows, axis, scale

    def _part(self, name: str) -> Matrices:
        found: Matrices = self.get_submodule(name)()
        return found

    def inner(self, x: Tensor, out: Tensor, counts: Sequence[int], product: Product) -> Tensor:
        """Output of the first matrix ``[n, F/etp]`` (gates, then ups) with the adapter applied.

        Args:
            x: ``[n, H]``, rows sorted by expert.
            out: output without the adapter.
            counts: rows of each expert.
            product: grouped matrix product.
        """
        if not self._names["fc1"]:
            return out
        delta = {}
        for name in self._names["fc1"]:
            part = self._part(name)
            narrow = product(x, _whole(part.a, 2, self.axis), counts) * self.scale
            delta[name] = product(narrow, part.b, counts)
        return out + self.rows.fused(delta, -1)

    def outer(self, x: Tensor, out: Tensor, counts: Sequence[int], product: Product) -> Tensor:
        """Output of the second matrix ``[n, H]``, a partial sum over the etp axis, with the adapter applied.

        Arguments as of :meth:`inner`, with ``x`` ``[n, F/etp]``.
        """
        for name in self._names["fc2"]:
            part = self._part(name)
            narrow = product(x, part.a, counts) * self.scale
            out = out + product(narrow, _whole(part.b, 1, self.axis), counts)
        return out


def _whole(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Gather slices along a dimension; the gradient of a slice is summed over all ranks."""
    if axis.size == 1:
        return x
    return gather_sequence(x.movedim(dim, 0).contiguous(), axis).movedim(0, dim).contiguous()

"""Adapters of linear layers, of the embedding and of the output layer, over the tensor-parallel ranks.

With ``r`` the rank of an adapter, ``R`` the number of tensor-parallel ranks and SP short for sequence parallelism:

=============  ==================  ==================  =====================================================
layer          ``A``               ``B``               between the two products
=============  ==================  ==================  =====================================================
column         ``[r, in]``         ``[out/R, r]``      gradients are summed; under SP tokens are gathered
row            ``[r, in/R]``       ``[out, r]``        sum over the ranks; under SP scattered by tokens
whole          ``[r, in]``         ``[out, r]``        nothing
embedding      ``[V/R, r]``        ``[H, r]``          as for row
output layer   ``[r, H]``          ``[V/R, r]``        nothing: its input is whole on all ranks
=============  ==================  ==================  =====================================================

The tensor between the two products has only ``r`` features, so an adapter communicates little. A replicated matrix gets
its whole gradient on every rank; under SP only that of the rank's tokens, and ``ParamSpec.grad_sum_over_tp`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.adapters.low_rank import LowRank, Matrices, Rows, squared_lengths
from lightning_megatron.comm.collectives import all_reduce, copy_to_region
from lightning_megatron.mesh import Axis
from lightning_megatron.ops.matmul import linear

Exchange = Callable[[Tensor, Axis], Tensor]


class _Adapter(nn.Module):
    """Base class: the adapted parts of one matrix, and with DoRA the norms of its rows.

    Args:
        parts: parameters by name of the part.
        rows: order of the matrix's rows.
        axis: the tensor-parallel ranks.
        scale: factor of the products.
        sums_inputs: True if ranks hold slices of the input features.
    """

    def __init__(
        self, parts: Mapping[str, LowRank], rows: Rows, axis: Axis, scale: float, *, sums_inputs: bool
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.parts, self.rows, self.axis, self.scale = tuple(parts), rows, axis, scale
        self._sums_inputs = sums_inputs
        self.has_magnitudes = any(part.lora_magnitude is not None for part in parts.values())

    def _part(self, name: str) -> Matrices:
        found: Matrices = self.get_submodule(name)()
        return found

    def _inputs(self, part: Matrices) -> Tensor:
        """This rank's part of ``A``, as ``[r, in]``."""
        return part.a

    def _lengths(self, name: str, weight: Tensor) -> Tensor:
        """Norms ``[rows of the part]`` of the rows of ``W + s B A`` in fp32, without gradient."""
        part = self._part(name)
        squares = squared_lengths(
            self.rows.of_part(name, weight), self._inputs(part).detach(), part.b.detach(), self.scale
        )
        return (all_reduce(squares, self.axis) if self._sums_inputs else squares).clamp_min(0).sqrt()

    def _factors(self, weight: Tensor) -> Tensor:
        """Factors ``[rows]`` by which DoRA brings the rows of ``weight`` ``[rows, in]`` to their magnitudes."""
        factors = {}
        for name in self.parts:
            lengths = self._lengths(name, weight)
            magnitude = self._part(name).magnitude
            assert magnitude is not None
            # Padding of a vocabulary has rows of zeros.
            factors[name] = magnitude / lengths.masked_fill(lengths == 0, 1.0).to(magnitude.dtype)
        others = {name: weight.new_ones(self.rows.groups * width) for name, width in self.rows.widths.items()}
        return self.rows.fused(others | factors, 0)

    @torch.no_grad()
    def begin(self, weight: Tensor) -> None:
        """Initialize the magnitudes with the norms of the frozen weight's rows; all ranks of the layer call this.

        Args:
            weight: frozen weight, already loaded; nothing happens for a weight on the meta device.
        """
        rows = self._as_rows(weight)
        for name in self.parts if self.has_magnitudes and not weight.is_meta else ():
            magnitude = self._part(name).magnitude
            assert magnitude is not None
            magnitude.copy_(self._lengths(name, rows))

    def _as_rows(self, weight: Tensor) -> Tensor:
        """A weight as ``[rows, in]``."""
        return weight.detach().flatten(0, -2)

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's part of the weight, with the adapter merged into it."""
        rows = weight.flatten(0, -2)
        part = {name: self._part(name).b @ self._part(name).a * self.scale for name in self.parts}
        whole = rows + self.rows.fused(part, 0)
        if self.has_magnitudes:
            whole = whole * self._factors(rows.detach()).unsqueeze(1)
        return whole.view_as(weight)


class LinearAdapter(_Adapter):
    """Adapter of a linear layer, or of some of the linear layers that a fused matrix holds.

    Other arguments as of the base class.

    Args:
        exchange: communication between the two products.
        dropout: dropout of the input, with a separate mask for each part.
    """

    def __init__(
        self,
        parts: Mapping[str, LowRank],
        rows: Rows,
        axis: Axis,
        scale: float,
        *,
        exchange: Exchange,
        sums_inputs: bool,
        dropout: nn.Module,
    ) -> None:
        super().__init__(parts, rows, axis, scale, sums_inputs=sums_inputs)
        self._exchange, self.dropout = exchange, dropout

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output with the adapter applied.

        Args:
            x: input of the layer.
            out: ``x W^T``, with the bias if there is one, as this rank has it.
            weight: frozen weight.
            bias: bias that ``out`` contains.
        """
        narrow = [linear(self.dropout(x), self._part(name).a) for name in self.parts]
        joined = self._exchange(narrow[0] if len(narrow) == 1 else torch.cat(narrow, dim=-1), self.axis) * self.scale
        pieces = zip(self.parts, joined.split([each.shape[-1] for each in narrow], dim=-1), strict=True)
        delta = self.rows.fused({name: linear(piece, self._part(name).b) for name, piece in pieces}, -1)
        if not self.has_magnitudes:
            return out + delta
        factors = self._factors(self._as_rows(weight))
        plain = out if bias is None else out - bias.detach().flatten()
        return out + (factors - 1) * plain + factors * delta


class EmbeddingAdapter(_Adapter):
    """Adapter of the token embedding; each rank holds the rows of ``A`` for its slice of the vocabulary.

    Other arguments as of the base class.

    Args:
        first_row: first token id of this rank.
        exchange: sum over the ranks.
    """

    def __init__(
        self, name: str, part: LowRank, axis: Axis, scale: float, *, first_row: int, exchange: Exchange
    ) -> None:
        super().__init__({name: part}, Rows(1, {name: part.lora_B.shape[0]}), axis, scale, sums_inputs=True)
        self._first_row, self._exchange = first_row, exchange

    def _inputs(self, part: Matrices) -> Tensor:
        return part.a.t()

    def _as_rows(self, weight: Tensor) -> Tensor:
        return weight.detach().t()

    def forward(self, tokens: Tensor, out: Tensor, weight: Tensor) -> Tensor:
        """The layer's output with the adapter applied.

        Args:
            tokens: ``[S, B]``.
            out: ``[S, B, H]``, or a sequence shard.
            weight: frozen weight ``[V/R, H]``.
        """
        part = self._part(self.parts[0])
        local = tokens - self._first_row
        elsewhere = (local < 0) | (local >= part.a.shape[0])
        narrow = F.embedding(local.masked_fill(elsewhere, 0), part.a).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        delta = linear(self._exchange(narrow, self.axis) * self.scale, part.b)
        if not self.has_magnitudes:
            return out + delta
        return self._factors(self._as_rows(weight)) * (out + delta)

    def merged(self, weight: Tensor) -> Tensor:
        """This rank's part of the weight, with the adapter merged into it."""
        part = self._part(self.parts[0])
        whole = weight + part.a @ part.b.t() * self.scale
        return whole * self._factors(self._as_rows(weight)) if self.has_magnitudes else whole


class HeadAdapter(_Adapter):
    """Adapter of the output layer: its input and its weight get ``r`` more features.

    So losses that never materialize all logits work unchanged. The copy of the weight, and its gradient, cost memory:
    with a large vocabulary, leave the output layer out of the targets.

    Arguments as of the base class; ``dropout`` is that of the input.
    """

    def __init__(self, name: str, part: LowRank, axis: Axis, scale: float, dropout: nn.Module) -> None:
        super().__init__({name: part}, Rows(1, {name: part.lora_B.shape[0]}), axis, scale, sums_inputs=False)
        self.dropout = dropout

    def forward(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Input ``[..., H + r]`` and weight ``[V/R, H + r]``.

        Args:
            hidden: ``[..., H]``, equal on all ranks; each computes the logits of its slice of the vocabulary.
            weight: frozen weight ``[V/R, H]``.
        """
        part = self._part(self.parts[0])
        # Each rank has another slice of the vocabulary, so the gradient of the replicated ``A`` is a sum over ranks.
        narrow = linear(self.dropout(hidden), copy_to_region(part.a, self.axis))
        wide = torch.cat((weight, part.b * self.scale), dim=1)
        if self.has_magnitudes:
            wide = wide * self._factors(self._as_rows(weight)).unsqueeze(1)
        return torch.cat((hidden, narrow), dim=-1), wide

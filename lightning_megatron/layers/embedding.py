"""Token embedding whose vocabulary is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm.collectives import reduce_from_region, reduce_scatter_sequence
from lightning_megatron.config.counts import padded_vocab_size
from lightning_megatron.layers.init import normal_
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.accumulate import add_rows_
from lightning_megatron.params import SAME_NAME, ParamSpec
from lightning_megatron.weight_grad_store import WeightGradStore


class _Rows(torch.autograd.Function):
    """Look up rows; backward adds their gradients to the accumulated one, without a gradient of the whole weight."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.store = weight, store
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        place = ctx.store.place_of(ctx.weight)
        if place is None:
            return None, _rows_gradient(tokens, ctx.weight, grad), None
        add_rows_(place, tokens.flatten(), grad.flatten(0, -2))
        return None, None, None


def _rows_gradient(tokens: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the whole weight."""
    if weight.is_cpu:
        return torch.zeros_like(weight).index_add_(0, tokens.flatten(), grad.flatten(0, -2))
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(F.embedding(tokens, leaf), leaf, grad)[0]


class VocabParallelEmbedding(nn.Module):
    """Embedding of token ids; each rank holds a slice of the rows.

    Rows past ``num_embeddings`` are padding: they are zero, no token selects them, and losses and checkpoints leave
    them out.

    Args:
        num_embeddings: true size of the vocabulary.
        embedding_dim: features ``H``.
        mesh: mesh of the ranks; ``None`` for one process.
        multiple: the vocabulary is padded to a multiple of ``multiple x tp``.
        sequence_parallel: True to return a sequence shard ``[S/tp, B, H]``.
        init_std: standard deviation of the initial weight.
        tied_copy: True if the weight is a copy of the weight of that name on another pipeline stage.
        dtype: dtype of the weight.
        device: device of the weight.

    Attributes:
        lora: adapters of the layer; ``None`` without.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: ParallelMesh | None = None,
        *,
        multiple: int = 128,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        tied_copy: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = mesh or ParallelMesh.single()
        self.axis, self.weight_grads = mesh.tp, mesh.weight_grads
        self.num_embeddings, self.embedding_dim, self.multiple = num_embeddings, embedding_dim, multiple
        self._tied_with = SAME_NAME if tied_copy else None
        self.lora: nn.Module | None = None
        self.sequence_parallel = sequence_parallel and self.axis.size > 1
        local = padded_vocab_size(num_embeddings, self.axis.size, multiple) // self.axis.size
        self.first_row = self.axis.rank * local
        self.weight = nn.Parameter(torch.empty(local, embedding_dim, dtype=dtype, device=device))
        normal_(self.weight, self.param_specs()["weight"], mesh.shard_ranks, init_std)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """The weight is cut along the vocabulary; its global shape is without padding."""
        shape = (self.num_embeddings, self.embedding_dim)
        return {"weight": ParamSpec(shape, tp_dim=0, tied_with=self._tied_with, multiple=self.multiple)}

    @property
    def is_tied_copy(self) -> bool:
        """True if the weight is a copy of another pipeline stage's, and does not embed tokens on this rank."""
        return self._tied_with is not None

    def forward(self, tokens: Tensor) -> Tensor:
        """``[S, B] -> [S, B, H]`` (``[S/tp, B, H]`` under sequence parallelism)."""
        out = self._without_adapter(tokens)
        return out if self.lora is None else self.lora(tokens, out, self.weight)

    def _without_adapter(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self._rows(tokens)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = self._rows(local.masked_fill(elsewhere, 0))
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_region)(rows, self.axis)

    def _rows(self, tokens: Tensor) -> Tensor:
        if not (self.weight_grads.takes_gradients and self.weight.requires_grad):
            return F.embedding(tokens, self.weight)
        rows: Tensor = _Rows.apply(tokens, self.weight, self.weight_grads)
        return rows

    def extra_repr(self) -> str:
        """Global sizes."""
        return f"vocab={self.num_embeddings}, dim={self.embedding_dim}, tp={self.axis.size}"

"""Parallel layers on local tensors; the collectives are inside, so models need none.

Each takes a :class:`~lightning_megatron.mesh.ParallelMesh`; on a mesh of one rank it is the ordinary layer, which is
the reference for every other layout. Activations are ``[S, B, H]``, under sequence parallelism ``[S/tp, B, H]``.
"""

from lightning_megatron.config.counts import padded_vocab_size
from lightning_megatron.layers.cross_entropy import linear_cross_entropy
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import LayerNorm, RMSNorm

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "linear_cross_entropy",
    "padded_vocab_size",
]

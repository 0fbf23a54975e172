"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

Keys and values of all heads are computed from one small vector per token, the latent. Rotary positions are applied only
to a small extra key that all heads share. Decoding caches only these two. Letters beside those of other layers: ``C``
features of the latent, ``Q`` of the queries' latent, ``R`` of the rotated ("turned") part of a key, ``D`` of a whole
query or key, ``V`` of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import copy_to_region, gather_sequence
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.documents import Documents
from lightning_megatron.layers.attention import HeadAttention, KVCache
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.norm import RMSNorm, model_norm
from lightning_megatron.layers.whole_linear import WholeLinear
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import ANY_DEVICE, Ops


class LatentAttention(HeadAttention):
    """Attention whose keys and values, and where configured whose queries, come from latents.

    Every tensor-parallel rank holds the whole down-projections (to the latents), and its heads' slice of the
    up-projections. Under sequence parallelism a rank computes the latents of its own tokens; then the latents are
    gathered, which are much smaller than the hidden states.

    Arguments and errors as of :class:`HeadAttention`; ``sequence_parallel`` is True if input and output are sequence
    shards.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: ParallelMesh,
        *,
        layer: int = 0,
        sequence_parallel: bool,
        causal: bool = True,
        recompute: RecomputePlan = NO_RECOMPUTE,
        ops: Ops = ANY_DEVICE,
    ) -> None:
        super().__init__(config, mesh, layer=layer, causal=causal, recompute=recompute, ops=ops)
        c, heads, bias = config, config.num_attention_heads, config.has_qkv_bias
        self.head_dim, self.turned, self.latent, self.value = c.head_dim, c.rotary_dim, c.kv_lora_rank, c.value_dim
        self.unturned, self.query_factor = c.head_dim - c.rotary_dim, c.query_factor
        self.axis, self.sequence_parallel = mesh.tp, sequence_parallel and mesh.tp.size > 1
        how: dict[str, Any] = {"mesh": mesh, "sequence_parallel": sequence_parallel, "init_std": c.init_stds.qkv}
        self.q: ColumnParallelLinear | None = None
        self.q_down: WholeLinear | None = None
        self.q_norm: RMSNorm | None = None
        self.q_up: ColumnParallelLinear | None = None
        if c.q_lora_rank:
            self.q_down = WholeLinear(c.hidden_size, c.q_lora_rank, bias=bias, **how)
            self.q_norm = model_norm(c, c.q_lora_rank, mesh, sequence_parallel, ops)
            self.q_up = ColumnParallelLinear(c.q_lora_rank, heads * c.head_dim, bias=False, **how)
        else:
            self.q = ColumnParallelLinear(c.hidden_size, heads * c.head_dim, bias=False, **how)
        self.kv_down = WholeLinear(c.hidden_size, c.kv_lora_rank + c.rotary_dim, bias=bias, **how)
        self.kv_norm = model_norm(c, c.kv_lora_rank, mesh, sequence_parallel, ops)
        self.kv_up = ColumnParallelLinear(c.kv_lora_rank, heads * (self.unturned + c.value_dim), bias=False, **how)
        how["init_std"] = c.init_stds.out
        self.out = RowParallelLinear(heads * c.value_dim, c.hidden_size, bias=c.has_attention_out_bias, **how)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        key_mask: Tensor | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[S, B, H] -> [S, B, H]``, or shards of it.

        Args:
            rotary: cosines and sines of the positions.
            cache: latents and turned keys of earlier tokens; this call appends to them.
            key_mask: ``[B, T]`` of the whole sequence, True for the keys that are seen; ``None`` for all.
            documents: documents; attention stays inside each. ``None`` for whole sequences.
        """
        assert rotary is not None
        q, turned_q = self._queries(x, rotary)  # [S, B, N/tp, D - R], [S, B, N/tp, R]
        latent, turned_k = self._latents(x, rotary)  # [S, B, C] or a sequence shard, [S, B, R]
        first = 0
        if cache is not None:
            whole = gather_sequence(latent, self.axis) if self.sequence_parallel else latent
            first = cache.held
            seen, turned_k = cache.extend(whole, turned_k)
        if first:
            core = self._absorbed(q, turned_q, seen, turned_k, first, key_mask)
        else:
            core = self._expanded(q, turned_q, latent, turned_k, key_mask, documents)
        return self.out(core.flatten(2, 3))

    def _queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The part of the queries without rotary positions, and the part with them."""
        if self.q is None:
            assert self.q_down is not None
            assert self.q_norm is not None
            assert self.q_up is not None
            rows = self.q_up(self.q_norm(self.q_down(x)))
        else:
            rows = self.q(x)
        heads = rows.unflatten(-1, (-1, self.head_dim))  # [S, B, N/tp, D]
        plain, turned = heads.split((self.unturned, self.turned), dim=-1)
        return plain, self.rope.run(turned, *rotary)

    def _latents(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Latents ``[S, B, C]``, a sequence shard of them under sequence parallelism, and keys ``[S, B, R]``, whole."""
        latent, key = self.kv_down(x).split((self.latent, self.turned), dim=-1)
        # Each rank's heads take a part in the gradient of the key that all of them share.
        key = (gather_sequence if self.sequence_parallel else copy_to_region)(key, self.axis)
        return self.kv_norm(latent.contiguous()), self.rope.run(key.unsqueeze(2), *rotary).squeeze(2)

    def _expanded(
        self,
        q: Tensor,
        turned_q: Tensor,
        latent: Tensor,
        turned_k: Tensor,
        key_mask: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        """``[S, B, N/tp, V]``, with keys and values of every head made from the latents."""
        heads = self.kv_up(latent).unflatten(-1, (-1, self.unturned + self.value))  # [S, B, N/tp, D - R + V]
        k, v = heads.split((self.unturned, self.value), dim=-1)
        shared = turned_k.unsqueeze(2).expand(-1, -1, k.shape[2], -1)
        # Values are copied: as a view they would keep the keys beside them until the backward.
        keys, values = torch.cat((k, shared), dim=-1), v.contiguous()
        return self.attend(self._sharpened(q, turned_q), keys, values, key_mask=key_mask, documents=documents)

    def _absorbed(
        self, q: Tensor, turned_q: Tensor, latent: Tensor, turned_k: Tensor, first: int, key_mask: Tensor | None
    ) -> Tensor:
        """Like :meth:`_expanded`, with the up-projections of keys and values absorbed into queries and outputs.

        The latents are then one key and one value that all heads share. That is far less work for a few new tokens
        after many cached ones.
        """
        by_head = self.kv_up.effective_weight.unflatten(0, (-1, self.unturned + self.value))  # [N/tp, D - R + V, C]
        to_keys, to_values = by_head.split((self.unturned, self.value), dim=1)
        absorbed = self._sharpened(torch.einsum("sbnd,ndc->sbnc", q, to_keys), turned_q)
        # Keep the scale of D features: the absorbed query has more.
        absorbed = absorbed * (self.rule.factor(self.head_dim) / self.rule.factor(absorbed.shape[-1]))
        key = torch.cat((latent, turned_k), dim=-1).unsqueeze(2)  # [T, B, 1, C + R]
        out = self.attend(absorbed, key, latent.unsqueeze(2), first, key_mask)  # [S, B, N/tp, C]
        return torch.einsum("sbnc,nvc->sbnv", out, to_values)

    def _sharpened(self, q: Tensor, turned_q: Tensor) -> Tensor:
        """Whole queries, with the factor that YaRN gives the scores."""
        whole = torch.cat((q, turned_q), dim=-1)
        return whole if self.query_factor == 1.0 else whole * self.query_factor

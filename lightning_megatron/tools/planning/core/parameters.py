"""Parameters of a pipeline rank: which tensors it holds, how large its shard of each is, and how each is reduced.

The list repeats the layers' ``param_specs``; ``tests/unit/planning`` compares it with real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lightning_megatron.config.counts import GATED
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.stage import StageLayers
from lightning_megatron.tools.planning.core.job import PlannedJob

KINDS = (
    "embedding",
    "positions",
    "attention",
    "latents",
    "mlp",
    "norms",
    "router",
    "experts",
    "shared experts",
    "head",
)
"""Kinds of parameters; ``latents`` are matrices to latents and from them."""


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter on one rank; the flags are those of ``optim.buffers.slot.BufferKey``.

    Attributes:
        kind: one of ``KINDS``.
        size: elements of this rank's shard, padding of the vocabulary included.
        whole: elements over all ranks, without padding.
        decay: True if weight decay applies, which decides its parameter group.
        replicated_over_tp: True if every tensor-parallel rank holds all of it.
        grad_sum_over_tp: True if its gradient is summed over tensor-parallel ranks.
        expert: True if it belongs to a routed expert.
        tied_copy: True if it is a copy of a parameter of another pipeline stage.
        reduce_late: True if its gradient still changes after the backward pass (tied embeddings).
    """

    kind: str
    size: int
    whole: int
    decay: bool = True
    replicated_over_tp: bool = False
    grad_sum_over_tp: bool = False
    expert: bool = False
    tied_copy: bool = False
    reduce_late: bool = False


FP8_ENDS = 1
"""Layers without fp8 at each end of a model, by the default recipe."""
FP8_KINDS = ("attention", "mlp", "shared experts", "experts")


def padded_vocabulary(config: TransformerConfig, tp: int) -> int:
    """The vocabulary rounded up to a multiple of ``vocab_multiple x tp``, as ``layers/embedding.py`` does."""
    step = config.vocab_multiple * tp
    return -(-config.vocab_size // step) * step


@lru_cache(maxsize=4096)
def rank_parameters(
    config: TransformerConfig, layout: ParallelLayout, stages: tuple[StageLayers, ...]
) -> tuple[PlannedParameter, ...]:
    """Parameters of some stages, in the order in which the model defines them."""
    shards = _Shards(config, layout)
    found: list[PlannedParameter] = []
    embeds = any(stage.has_embedding for stage in stages)
    predicts = any(stage.has_loss for stage in stages)
    found += shards.embedding(embeds, predicts)
    dense, sparse = tuple(shards.layer(False)), tuple(shards.layer(True))
    for stage in stages:
        for number in stage.layers:
            found += sparse if config.has_experts(number) else dense
    if predicts:
        found += shards.head()
        for _ in range(config.mtp_num_layers):
            found += shards.further()
    return tuple(found)


@dataclass(frozen=True)
class _Shards:
    """Shards of a model's parameters on one rank.

    Attributes:
        config: shape of the model.
        layout: layout of the job.
    """

    config: TransformerConfig
    layout: ParallelLayout

    def _cut(self, kind: str, whole: int, *, decay: bool = True) -> PlannedParameter:
        """A tensor that is sharded over tensor-parallel ranks."""
        return PlannedParameter(kind, whole // self.layout.tp, whole, decay)

    def _whole(self, kind: str, size: int, *, decay: bool = False) -> PlannedParameter:
        """A tensor of which every tensor-parallel rank holds a copy."""
        shared = self.layout.tp > 1
        return PlannedParameter(kind, size, size, decay, shared, shared and self.layout.uses_sequence_parallel)

    def _norm(self) -> Iterator[PlannedParameter]:
        yield self._whole("norms", self.config.hidden_size)
        if self.config.norm == "layernorm":
            yield self._whole("norms", self.config.hidden_size)

    def _vocabulary(self, kind: str, *, tied_copy: bool = False, reduce_late: bool = False) -> PlannedParameter:
        c, tp = self.config, self.layout.tp
        rows = padded_vocabulary(c, tp) // tp
        size, whole = rows * c.hidden_size, c.vocab_size * c.hidden_size
        return PlannedParameter(kind, size, whole, tied_copy=tied_copy, reduce_late=reduce_late)

    def embedding(self, embeds: bool, predicts: bool) -> Iterator[PlannedParameter]:
        """Embeddings of a rank; the last stage has a copy if its output layer or modules for further tokens need it."""
        c = self.config
        shares = c.tie_embeddings or c.mtp_num_layers > 0
        late = shares and self.layout.pp > 1
        if embeds or (predicts and shares):
            yield self._vocabulary("embedding", tied_copy=not embeds, reduce_late=late)
        if embeds and c.position_embedding == "learned":
            yield self._whole("positions", c.max_position_embeddings * c.hidden_size, decay=True)
        if embeds and c.embedding_norm:
            yield from self._norm()

    def head(self) -> Iterator[PlannedParameter]:
        """Final norm and output layer."""
        yield from self._norm()
        if not self.config.tie_embeddings:
            yield self._vocabulary("head")

    def further(self) -> Iterator[PlannedParameter]:
        """Module for a further token: two norms, a projection, a block like the last one, a norm."""
        c = self.config
        yield from (*self._norm(), *self._norm())
        yield self._whole("head", 2 * c.hidden_size**2, decay=True)
        yield from (*self.layer(c.has_experts(c.num_layers - 1)), *self._norm())

    def layer(self, has_experts: bool) -> Iterator[PlannedParameter]:
        """One transformer block."""
        c = self.config
        if has_experts and not c.num_experts:
            return
        yield from self._norm()
        yield from self._latents() if c.has_latents else self._heads()
        for _ in range(2 if c.post_norms else 1):
            yield from self._norm()
        if has_experts:
            yield from self._experts()
        else:
            features, bias = c.ffn_hidden_size, c.add_bias_linear
            yield from self._linears("mlp", self._gates * features, features, bias, bias)
        if c.post_norms:
            yield from self._norm()

    def _heads(self) -> Iterator[PlannedParameter]:
        """Attention with one matrix to queries, keys and values."""
        c = self.config
        queries, groups = c.num_attention_heads * c.head_dim, c.num_query_groups * c.head_dim
        if c.attention_sinks:
            yield self._cut("attention", c.num_attention_heads, decay=False)
        yield from self._linears("attention", queries + 2 * groups, queries, c.has_qkv_bias, c.has_attention_out_bias)
        if c.qk_norm:
            yield from self._head_norms()

    def _latents(self) -> Iterator[PlannedParameter]:
        """Attention with latents: matrices to them are whole, those from them are cut by heads."""
        c, n = self.config, self.config.num_attention_heads
        unturned = c.head_dim - c.rotary_dim
        for rank, down, up in (
            (c.q_lora_rank, c.q_lora_rank, c.head_dim),
            (c.kv_lora_rank, c.kv_lora_rank + c.rotary_dim, unturned + c.value_dim),
        ):
            if rank:
                yield self._whole("latents", down * c.hidden_size, decay=True)
                if c.has_qkv_bias:
                    yield self._whole("latents", down)
                yield self._whole("norms", rank)
            yield self._cut("latents", (rank or c.hidden_size) * n * up)
        yield self._cut("attention", n * c.value_dim * c.hidden_size)
        if c.has_attention_out_bias:
            yield self._whole("attention", c.hidden_size)

    @property
    def _gates(self) -> int:
        return 2 if self.config.activation in GATED else 1

    def _head_norms(self) -> Iterator[PlannedParameter]:
        """Norms of queries and keys: gradients are summed over tp, since each rank normalizes other heads."""
        c, shared = self.config, self.layout.tp > 1
        for _ in range(2 if c.norm == "rmsnorm" else 4):
            yield PlannedParameter("norms", c.head_dim, c.head_dim, False, shared, shared)

    def _linears(
        self, kind: str, out: int, inner: int, column_bias: bool, row_bias: bool
    ) -> Iterator[PlannedParameter]:
        """A column-parallel layer to ``out`` features, and a row-parallel one from ``inner``."""
        h = self.config.hidden_size
        yield self._cut(kind, out * h)
        if column_bias:
            yield self._cut(kind, out, decay=False)
        yield self._cut(kind, inner * h)
        if row_bias:
            yield self._whole(kind, h)

    def _experts(self) -> Iterator[PlannedParameter]:
        c = self.config
        h, features = c.hidden_size, c.expert_ffn_hidden_size
        share = self.layout.ep * self.layout.expert_tensor_parallel_size
        yield self._whole("router", c.num_experts * h, decay=True)
        for columns in (self._gates * features, features):
            whole = c.num_experts * columns * h
            yield PlannedParameter("experts", whole // share, whole, expert=True)
        if c.moe_linear_bias:
            yield self._whole("router", c.num_experts)
            for width in (self._gates * features, h):
                yield PlannedParameter(
                    "experts", c.num_experts * width // share, c.num_experts * width, False, expert=True
                )
        if c.moe_shared_expert_ffn_hidden_size:
            inner = c.moe_shared_expert_ffn_hidden_size
            yield from self._linears("shared experts", self._gates * inner, inner, column_bias=False, row_bias=False)


def fp8_weights(job: PlannedJob, pipeline_rank: int) -> int:
    """Elements of this rank's weights that are multiplied in fp8."""
    if not job.fp8:
        return 0
    shards, config = _Shards(job.config, job.layout), job.config
    of = {kind: sum(p.size for p in shards.layer(kind) if p.kind in FP8_KINDS and p.decay) for kind in (False, True)}
    numbers = (number for stage in job.stages_of(pipeline_rank) for number in stage.layers)
    inner = (number for number in numbers if FP8_ENDS <= number < config.num_layers - FP8_ENDS)
    return sum(of[config.has_experts(number)] for number in inner)

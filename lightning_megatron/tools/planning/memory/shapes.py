"""Bytes of the tensors that one micro-batch makes on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

from lightning_megatron.config.counts import GATED, padded_vocab_size
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.tools.planning.core.experts import expert_rows, gathers_tokens
from lightning_megatron.tools.planning.core.job import AttentionKind, PlannedJob

LOGITS_CHUNK_BYTES = 32 << 20
"""Approximate size of the fp32 logits of a chunk, as in ``layers/cross_entropy.py``."""
MOST_16_BIT_CHUNKS = 8
"""Largest number of chunks of logits for 16-bit weights, as there."""


@dataclass(frozen=True)
class Kernels:
    """Traits of a device's kernels and collectives that decide which tensors there are.

    Attributes:
        fuses_norm: True if a norm makes no fp32 copies of its input.
        adds_gradients: True if layers add a weight's gradient to the buffer themselves, before the last backward.
        adds_wider: True if they add a 16-bit product to an fp32 sum without a tensor for it.
        fuses_experts: True if the experts' products add all gradients to the buffer themselves, the last ones too
            (Transformer Engine's do).
        copies_pieces: True if a reduce-scatter receives a piece from every rank before it adds them up.
        pads_values: True if a fused attention kernel takes only values of the keys' size, so that others are padded.
        blocks_of_logits: True if softmax processes a few rows of logits at a time, where the vocabulary is not sharded.
        large_blocks: True if attention that is computed block by block has blocks of an accelerator's size.
        flash_in_parts: True if a flash kernel computes a part of the keys, for a ring, or a window, in 16 bits.
    """

    fuses_norm: bool = True
    adds_gradients: bool = False
    adds_wider: bool = False
    fuses_experts: bool = False
    copies_pieces: bool = False
    pads_values: bool = False
    blocks_of_logits: bool = False
    large_blocks: bool = True
    flash_in_parts: bool = False


ACCELERATOR = Kernels()
"""Kernels of an accelerator without one that adds a product to a wider sum."""
ADDING = Kernels(adds_gradients=True, adds_wider=True, flash_in_parts=True)
"""Kernels of one that has such a kernel, and torch's flash kernel for parts of the keys."""
HOST = Kernels(
    fuses_norm=False,
    adds_gradients=True,
    copies_pieces=True,
    pads_values=True,
    blocks_of_logits=True,
    large_blocks=False,
)
"""Kernels and collectives of a CPU: what a rehearsal on fake CPU tensors runs."""


@dataclass(frozen=True, eq=False)  # made once for each job, and looked up by identity
class Shapes:
    """Bytes of single tensors of a layer, for one micro-batch on one rank.

    Letters of shapes: ``s`` tokens of a rank's sequence shard over cp, ``b`` samples, ``h`` features.

    Attributes:
        config: shape of the model.
        layout: layout of the job.
        seq_length: tokens of a sample.
        micro_batch_size: samples.
        item: bytes of a value.
        grad_item: bytes of a value of an accumulated gradient.
        imbalance: tokens of the most loaded rank's experts over the mean.
        attention: implementation of attention.
        kernels: kernels of the device.
    """

    config: TransformerConfig
    layout: ParallelLayout
    seq_length: int
    micro_batch_size: int
    item: int
    grad_item: int
    imbalance: float
    attention: AttentionKind
    kernels: Kernels

    @cached_property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.layout.tp

    @cached_property
    def is_sharded(self) -> bool:
        """True if the residual stream is cut over tensor-parallel ranks."""
        return self.tp > 1 and self.layout.uses_sequence_parallel

    @cached_property
    def positions(self) -> int:
        """``s b``: tokens of a micro-batch on the ranks that share one sequence shard."""
        return self.seq_length // self.layout.cp * self.micro_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens whose residual stream this rank holds."""
        return self.positions // self.tp if self.is_sharded else self.positions

    @cached_property
    def residual(self) -> int:
        """Residual stream: ``[s, b, h]``, or this rank's shard of it."""
        return self.tokens * self.config.hidden_size * self.item

    @cached_property
    def whole(self) -> int:
        """``[s, b, h]``, gathered."""
        return self.positions * self.config.hidden_size * self.item

    @cached_property
    def gathered(self) -> int:
        """Residual stream that a column-parallel layer gathers first; 0 if it is whole already."""
        return self.whole if self.is_sharded else 0

    @cached_property
    def summed(self) -> int:
        """Buffers of a sum over tensor-parallel ranks, without its input."""
        if self.tp == 1:
            return 0
        received = self.whole if self.is_sharded and self.kernels.copies_pieces else 0
        return self.residual + received

    def column_gradients(self, weight: int) -> int:
        """Temporaries of a column-parallel layer's backward: input gathered again, input gradient, weight gradient.

        Args:
            weight: elements of the weight.
        """
        gradient = self.product(weight)
        if self.tp == 1:
            return self.whole + gradient
        if not self.is_sharded:
            return self.whole + max(self.whole, gradient)
        if self.kernels.copies_pieces:
            return self.gathered + self.summed + max(self.whole, gradient)
        return self.gathered + self.summed + self.whole + gradient

    @cached_property
    def queries(self) -> int:
        """Queries of this rank's heads."""
        c = self.config
        return self.positions * c.num_attention_heads // self.tp * c.head_dim * self.item

    @cached_property
    def keys(self) -> int:
        """Keys of this rank's heads."""
        c = self.config
        return self.positions * c.num_query_groups // self.tp * c.head_dim * self.item

    @cached_property
    def values(self) -> int:
        """Values of this rank's heads."""
        return self.keys // self.config.head_dim * self.config.value_dim

    @cached_property
    def outputs(self) -> int:
        """Output of this rank's heads."""
        return self.queries // self.config.head_dim * self.config.value_dim

    @cached_property
    def head_norms(self) -> int:
        """Inputs and statistics that the norms of queries and keys keep for backward; 0 without such norms."""
        heads = self.config.num_attention_heads + self.config.num_query_groups
        return (self.queries + self.keys + 4 * self.positions * heads // self.tp) * self.config.qk_norm

    @cached_property
    def exchanged_keys(self) -> int:
        """Keys that an all-to-all over cp sends; heads that do not split are repeated."""
        groups = self.config.num_query_groups // self.tp
        return self.keys * (self.layout.cp // gcd(groups, self.layout.cp))

    @cached_property
    def exchanged_values(self) -> int:
        """Values that an all-to-all over cp sends."""
        return self.exchanged_keys // self.config.head_dim * self.config.value_dim

    @cached_property
    def log_sums(self) -> int:
        """One fp32 number for each query and head."""
        return 4 * self.positions * self.config.num_attention_heads // self.tp

    @cached_property
    def scores(self) -> int:
        """Elements of all attention scores of this rank, without context parallelism."""
        heads = self.config.num_attention_heads // self.tp
        return self.micro_batch_size * heads * self.seq_length * self.seq_length // self.layout.cp

    @cached_property
    def gates(self) -> int:
        """Matrices side by side in ``fc1``."""
        return 2 if self.config.activation in GATED else 1

    def inner(self, features: int) -> int:
        """Input of ``fc2`` for ``features`` over all tensor-parallel ranks."""
        return self.positions * features // self.tp * self.item

    @cached_property
    def norm_copies(self) -> int:
        """Temporaries of a norm's forward, without its output."""
        is_fused = self.kernels.fuses_norm or self.config.norm == "layernorm"
        wide = self.residual * 4 // self.item
        return 0 if is_fused else 2 * wide if self.item < 4 else 0

    @cached_property
    def norm_gradients(self) -> int:
        """Temporaries of a norm's backward, with its result."""
        is_fused = self.kernels.fuses_norm or self.config.norm == "layernorm"
        wide = self.residual * 4 // self.item
        return self.residual if is_fused else 3 * wide if self.item < 4 else wide

    @cached_property
    def mask(self) -> int:
        """Mask of the dropout of a sub-layer's output, one byte a value."""
        return self.residual // self.item if self.config.hidden_dropout else 0

    @cached_property
    def norm_statistics(self) -> int:
        """Numbers that a norm keeps for each token."""
        return 4 * self.tokens * (2 if self.config.norm == "layernorm" else 1)

    @cached_property
    def post_norm(self) -> int:
        """Bytes that a norm behind a sub-layer keeps: its input, and its statistics."""
        return self.residual + self.norm_statistics if self.config.post_norms else 0

    # Weights

    def gradient(self, elements: int) -> int:
        """Temporary bytes of a weight's gradient before it is added to the buffer: itself and, if needed, a copy."""
        return self.product(elements) if self.kernels.adds_gradients else self.returned(elements)

    def product(self, elements: int) -> int:
        """Bytes of a weight's gradient as its product returns it; 0 if the product accumulates into the buffer."""
        adds = self.kernels.adds_gradients and (not self.cast or self.kernels.adds_wider)
        return 0 if adds else self.item * elements

    def returned(self, elements: int) -> int:
        """Temporary bytes of a gradient that autograd adds to the buffer."""
        return elements * (self.item + self.cast)

    @cached_property
    def cast(self) -> int:
        """Bytes of an element of a gradient's copy in the buffer's dtype; 0 where dtypes agree."""
        return self.grad_item if self.grad_item != self.item else 0

    @cached_property
    def vocabulary(self) -> int:
        """Elements of this rank's rows of the embedding, or of the output layer."""
        return self.vocabulary_rows * self.config.hidden_size

    @cached_property
    def vocabulary_rows(self) -> int:
        """Rows of the vocabulary on this rank, padding included."""
        return padded_vocab_size(self.config.vocab_size, self.tp, self.config.vocab_multiple) // self.tp

    @cached_property
    def logits_chunk(self) -> int:
        """Tokens whose logits exist at a time."""
        length = max(1, LOGITS_CHUNK_BYTES // (4 * self.vocabulary_rows))
        if self.item < 4:
            length = max(length, -(-self.positions // MOST_16_BIT_CHUNKS))
        return min(length, self.positions)

    # Experts

    @cached_property
    def expert_rows(self) -> int:
        """Rows that this rank's experts compute."""
        return expert_rows(self.config, self.layout, self.tokens, self.imbalance)

    @cached_property
    def experts_at_once(self) -> int:
        """Experts whose weights' gradients exist at the same time beside their sums."""
        if self.kernels.fuses_experts:
            return 0
        return 1 if self.kernels.adds_gradients else self.config.num_experts // self.layout.ep

    @cached_property
    def gathers_tokens(self) -> bool:
        """True if every rank gets all tokens, False if each token is sent to the ranks of its experts."""
        return gathers_tokens(self.config)


def shapes_of(job: PlannedJob, kernels: Kernels = ACCELERATOR) -> Shapes:
    """Tensors of a micro-batch of a job."""
    b = job.item_bytes
    size = job.seq_length, job.micro_batch_size
    return _shapes(job.config, job.layout, size, (b.params, b.grads), job.expert_imbalance, job.attention, kernels)


@lru_cache(maxsize=4096)
def _shapes(
    config: TransformerConfig,
    layout: ParallelLayout,
    size: tuple[int, int],
    items: tuple[int, int],
    imbalance: float,
    attention: AttentionKind,
    kernels: Kernels,
) -> Shapes:
    return Shapes(config, layout, *size, *items, imbalance, attention, kernels)

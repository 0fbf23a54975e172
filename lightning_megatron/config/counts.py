"""Parameters and FLOPs of a model, by layer."""

from __future__ import annotations

from lightning_megatron.config.attention import AttentionConfig
from lightning_megatron.config.moe import MoEConfig

GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "swiglu_clamped"})
"""Activations with a gate. The gate takes a further matrix."""


def padded_vocab_size(vocab_size: int, tp: int = 1, multiple: int = 128) -> int:
    """The vocabulary rounded up to a multiple of ``multiple x tp``, so that every rank holds a well-shaped slice."""
    step = multiple * tp
    return -(-vocab_size // step) * step


class LayerCounts(AttentionConfig, MoEConfig):
    """Sums over layers of what each part has; :class:`TransformerConfig` has the fields.

    A configuration with other kinds of layers overrides the methods that take the number of a layer.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    ffn_hidden_size: int
    norm: str
    post_norms: bool
    activation: str
    position_embedding: str
    add_bias_linear: bool
    tie_embeddings: bool
    embedding_norm: bool
    mtp_num_layers: int

    @property
    def rotary_dim(self) -> int:
        """Features of a query and a key that the rotary embedding rotates."""
        return self.rope_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.v_head_dim or self.head_dim

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Features inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_out_bias(self) -> bool:
        """True if the output of attention has biases."""
        return self.add_bias_linear or self.add_attention_out_bias

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters of the model this describes, vocabulary padding not counted.

        Args:
            active: True to count only the ``moe_router_topk`` experts of a token, and their rows of the router.
        """
        h, further = self.hidden_size, self.mtp_num_layers
        norm = h if self.norm == "rmsnorm" else 2 * h
        norms = (4 if self.post_norms else 2) * norm
        layers = [*range(self.num_layers), *[self.num_layers - 1] * further]
        blocks = sum(
            self.mixer_parameters(number) + self.feed_forward_parameters(number, active=active) + norms
            for number in layers
        )
        blocks += further * (2 * h * h + 3 * norm)
        positions = self.max_position_embeddings * h if self.position_embedding == "learned" else 0
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2) + positions
        return blocks + tables + norm * (2 if self.embedding_norm else 1)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers that have experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def loss_cost(self) -> float:
        """FLOPs of everything after the layers, divided by those of a layer's matrices."""
        layers = 6.0 * sum(map(self._matrices, range(self.num_layers)))
        return (self.flops_per_token(0) - layers) * self.num_layers / layers

    def flops_per_token(self, seq_length: int) -> float:
        """Matmul FLOPs of forward and backward for one token, the visible part of attention counted.

        Megatron-LM's formula (https://arxiv.org/abs/2104.04473, appendix, with the causal half): 6 times the weights
        that a token meets in attention, feed-forward layers and the output layer. Only the experts that a token visits
        are counted, but the whole router, ``E H`` per layer, which computes logits for every expert (Megatron-LM leaves
        the router out). A multi-token prediction module counts as a layer, its projection, and an output layer.
        """
        h, further = self.hidden_size, self.mtp_num_layers
        layers = [*range(self.num_layers), *[self.num_layers - 1] * further]
        matrices = sum(map(self._matrices, layers)) + (1 + further) * h * self.vocab_size + further * 2 * h * h
        return 6.0 * (matrices + sum(self.mixer_products(number, seq_length) for number in layers))

    def _matrices(self, layer: int) -> int:
        """Elements of the matrices that a token is multiplied by in the layer of that number."""
        return self.mixer_matrices(layer) + self.feed_forward_matrices(layer)

    def mixer_parameters(self, layer: int) -> int:
        """Parameters of the mixer in the layer of that number, without the block's norms."""
        return self.attention_weights + self._attention_vectors

    def mixer_matrices(self, layer: int) -> int:
        """Elements of the mixer's matrices that a token is multiplied by."""
        return self.attention_weights

    def mixer_products(self, layer: int, length: int) -> float:
        """Multiplications per token of products between tokens, in sequences of ``length``."""
        return self.num_attention_heads * (self.head_dim + self.value_dim) * self.seen(layer, length)

    def feed_forward_parameters(self, layer: int, *, active: bool = False) -> int:
        """Parameters of the feed-forward part, or those that serve one token."""
        gates = 2 if self.activation in GATED else 1
        if not self.has_experts(layer):
            biases = gates * self.ffn_hidden_size + self.hidden_size if self.add_bias_linear else 0
            return self._feed_forward_weights(self.ffn_hidden_size) + biases
        count = self.moe_router_topk if active else self.num_experts
        expert = self._feed_forward_weights(self.expert_ffn_hidden_size) + self.hidden_size
        if self.moe_linear_bias:  # of both layers, and of the router
            expert += gates * self.expert_ffn_hidden_size + self.hidden_size + 1
        return count * expert + self._feed_forward_weights(self.moe_shared_expert_ffn_hidden_size)

    def feed_forward_matrices(self, layer: int) -> int:
        """Elements of the feed-forward part's matrices that a token is multiplied by."""
        if not self.has_experts(layer):
            return self._feed_forward_weights(self.ffn_hidden_size)
        features = self.moe_router_topk * self.expert_ffn_hidden_size + self.moe_shared_expert_ffn_hidden_size
        return self._feed_forward_weights(features) + self.num_experts * self.hidden_size

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of attention in a layer."""
        h, heads, latent, rank = self.hidden_size, self.num_attention_heads, self.kv_lora_rank, self.q_lora_rank
        if not latent:
            return h * self.head_dim * 2 * (heads + self.num_query_groups)
        queries, values = heads * self.head_dim, heads * self.value_dim
        to_queries = rank * (h + queries) if rank else h * queries
        from_latent = latent * (queries - heads * self.rotary_dim + values)
        return to_queries + h * (latent + self.rotary_dim) + from_latent + values * h

    @property
    def _attention_vectors(self) -> int:
        """Elements of the biases, norms and sinks inside attention in a layer."""
        out_bias, norm = self.hidden_size * self.has_attention_out_bias, 1 if self.norm == "rmsnorm" else 2
        if self.has_latents:
            latents = self.q_lora_rank + self.kv_lora_rank
            return norm * latents + (latents + self.rotary_dim) * self.has_qkv_bias + out_bias
        fused = self.head_dim * (self.num_attention_heads + 2 * self.num_query_groups)
        biases, norms = fused * self.has_qkv_bias + out_bias, 2 * self.head_dim * norm * self.qk_norm
        return biases + norms + self.num_attention_heads * self.attention_sinks

    def _feed_forward_weights(self, features: int) -> int:
        return self.hidden_size * features * (3 if self.activation in GATED else 2)

    def mean_seen(self, length: int) -> float:
        """Mean over layers of the number of tokens that a token of a sequence of ``length`` sees."""
        kinds = self.attention_kinds(self.num_layers)
        return sum(count * self.seen(number, length) for number, count in kinds.items()) / self.num_layers

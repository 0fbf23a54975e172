"""The shape of a transformer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_megatron.config import Problem, divisors, is_whole, nearest_names, nearest_to, raise_if_any
from lightning_megatron.layers.norm import NORMS
from lightning_megatron.layers.rotary import RopeScaling
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.ops.activation import ACTIVATIONS, GATED

POSITION_EMBEDDINGS = ("learned", "rope", "none")


@dataclass(frozen=True)
class TransformerConfig(MoEConfig):
    """The shape of a decoder-only transformer, in the field's words; of its experts, see :class:`MoEConfig`.

    Attributes:
        num_layers: transformer blocks.
        hidden_size: features ``H`` between blocks.
        num_attention_heads: query heads.
        vocab_size: true size of the vocabulary; padding is the layout's business.
        max_position_embeddings: longest sequence.
        ffn_hidden_size: features inside the feed-forward layer; ``None`` means ``4 hidden_size``.
        num_query_groups: key/value heads; ``None`` means one a query head.
        head_dim: features of a head; ``None`` means ``hidden_size / num_attention_heads``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        norm_epsilon: added under the norm's root.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"swiglu"``.
        position_embedding: ``"learned"``, ``"rope"`` or ``"none"``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: LLaMA 3's rule, or ``None``; a dict of its fields is taken too (YAML).
        add_bias_linear: whether linear layers have biases.
        tie_embeddings: whether the output layer is the embedding.
        init_std: standard deviation of initial weights; output projections get ``init_std / sqrt(2 num_layers)``.
        hidden_dropout: dropout of embeddings and of each sub-layer's output.
        attention_dropout: dropout of attention weights.
        label_smoothing: share ``s`` of the target's probability that goes to all ``V`` tokens alike, the target among
            them: torch's definition. Megatron-LM's goes to the ``V - 1`` others; its ``s`` is ``s V / (V - 1)`` here.
        vocab_multiple: the vocabulary is padded to a multiple of this times tp.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    ffn_hidden_size: int = 0
    num_query_groups: int = 0
    head_dim: int = 0
    norm: str = "layernorm"
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    position_embedding: str = "learned"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    add_bias_linear: bool = True
    tie_embeddings: bool = True
    init_std: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    label_smoothing: float = 0.0
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        # Open fields are derived once, here, so that everybody else reads numbers.
        found = self._value_problems()
        if isinstance(self.rope_scaling, dict):
            known = [f.name for f in fields(RopeScaling)]
            unknown = [name for name in self.rope_scaling if name not in known]
            found += [
                Problem(f"rope_scaling[{name!r}]", self.rope_scaling[name], "no such field", nearest_names(name, known))
                for name in unknown
            ]
            if not unknown:
                object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        raise_if_any(found)
        object.__setattr__(self, "moe_layers", tuple(self.moe_layers))
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        object.__setattr__(self, "num_query_groups", self.num_query_groups or self.num_attention_heads)
        if not self.head_dim and self.hidden_size % self.num_attention_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        raise_if_any(self._shape_problems())

    def _value_problems(self) -> list[Problem]:
        """Faults of single fields."""
        required = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
        derived = ("ffn_hidden_size", "num_query_groups", "head_dim")
        found = []
        for name in (*required, *derived, "vocab_multiple"):
            value, least = getattr(self, name), 0 if name in derived else 1
            if not is_whole(value, at_least=least):
                found.append(Problem(name, value, f"must be a whole number of at least {least}", (least,)))
        choices = {"norm": NORMS, "activation": ACTIVATIONS, "position_embedding": POSITION_EMBEDDINGS}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                found.append(Problem(name, value, "unknown", nearest_names(str(value), list(known))))
        for name in ("hidden_dropout", "attention_dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(Problem(name, getattr(self, name), "must be at least 0 and less than 1"))
        return found

    def _shape_problems(self) -> list[Problem]:
        """Faults of fields that must fit together."""
        found = []
        heads, groups = self.num_attention_heads, self.num_query_groups
        found += self.moe_problems()
        beyond = [number for number in self.moe_layers if not 0 <= number < self.num_layers]
        if beyond:
            found.append(Problem("moe_layers", beyond, f"layers are numbered 0 to {self.num_layers - 1}"))
        if self.num_experts and self.add_bias_linear:
            found.append(Problem("add_bias_linear", True, "experts have no biases", (False,)))
        if not self.head_dim:
            near = nearest_to(heads, divisors(self.hidden_size))
            reason = f"hidden_size={self.hidden_size} does not split over the heads, and head_dim is not given"
            found.append(Problem("num_attention_heads", heads, reason, near))
        elif self.position_embedding == "rope" and self.head_dim % 2:
            near = nearest_to(self.head_dim, (self.head_dim - 1, self.head_dim + 1))
            found.append(Problem("head_dim", self.head_dim, "rotary embedding turns pairs of features", near))
        if heads % groups:
            reason = f"num_attention_heads={heads} does not split into groups of equal size"
            found.append(Problem("num_query_groups", groups, reason, nearest_to(groups, divisors(heads))))
        return found

    @property
    def expert_ffn_hidden_size(self) -> int:
        """Features inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the layers that write to the residual stream (GPT-2's rule)."""
        return float(self.init_std / (2 * self.num_layers) ** 0.5)

    def replace(self, **overrides: Any) -> TransformerConfig:
        """A copy with some fields changed; sizes that were derived from a changed field are derived again.

        Raises:
            ConfigError: for a name that is no field.
        """
        known = [f.name for f in fields(self)]
        raise_if_any(
            Problem(name, value, "no such field of TransformerConfig", nearest_names(name, known))
            for name, value in overrides.items()
            if name not in known
        )
        if "hidden_size" in overrides:
            if self.ffn_hidden_size == 4 * self.hidden_size:
                overrides.setdefault("ffn_hidden_size", 0)
            overrides.setdefault("head_dim", 0)
        if "num_attention_heads" in overrides:
            overrides.setdefault("head_dim", 0)
            if self.num_query_groups == self.num_attention_heads:
                overrides.setdefault("num_query_groups", 0)
        return replace(self, **overrides)

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters of the model this describes, vocabulary padding not counted.

        Args:
            active: of experts, and of their rows in the router, count only the ``moe_router_topk`` that a token visits.
        """
        h = self.hidden_size
        norm = h if self.norm == "rmsnorm" else 2 * h
        biases = self.head_dim * (self.num_attention_heads + 2 * self.num_query_groups) + h
        blocks = self.num_layers * (self._attention_weights + biases * self.add_bias_linear + 2 * norm)
        blocks += sum(self._feed_forward_parameters(number, active) for number in range(self.num_layers))
        positions = self.max_position_embeddings * h if self.position_embedding == "learned" else 0
        return blocks + self.vocab_size * h * (1 if self.tie_embeddings else 2) + positions + norm

    @property
    def _attention_weights(self) -> int:
        return self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_query_groups)

    def _feed_forward_weights(self, features: int) -> int:
        return self.hidden_size * features * (3 if self.activation in GATED else 2)

    def _feed_forward_parameters(self, layer: int, active: bool) -> int:
        if not self.has_experts(layer):
            gates = 2 if self.activation in GATED else 1
            biases = gates * self.ffn_hidden_size + self.hidden_size if self.add_bias_linear else 0
            return self._feed_forward_weights(self.ffn_hidden_size) + biases
        count = self.moe_router_topk if active else self.num_experts
        expert = self._feed_forward_weights(self.expert_ffn_hidden_size) + self.hidden_size
        return count * expert + self._feed_forward_weights(self.moe_shared_expert_ffn_hidden_size)

    def flops_per_token(self, seq_length: int) -> float:
        """Matmul FLOPs of forward and backward for one token, the causal half of attention counted.

        Megatron-LM's formula (https://arxiv.org/abs/2104.04473, appendix, with the causal half): 6 times the weights
        that a token meets in attention, feed-forward layers and the output layer. Of experts those that it visits are
        counted, and the whole router, ``E H`` of a layer: a token's logits are made for every expert, whichever it
        visits. (Megatron-LM leaves the router out.)
        """
        matrices = self.num_layers * self._attention_weights + self.hidden_size * self.vocab_size
        for number in range(self.num_layers):
            if self.has_experts(number):
                not_visited = self.num_experts - self.moe_router_topk
                matrices += self._feed_forward_parameters(number, active=True) + not_visited * self.hidden_size
            else:
                matrices += self._feed_forward_weights(self.ffn_hidden_size)
        scores = self.num_layers * self.num_attention_heads * self.head_dim * seq_length
        return 6.0 * (matrices + scores)

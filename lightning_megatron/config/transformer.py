"""The shape of a transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from torch import Tensor

from lightning_megatron.arguments import OneOf, Rules, above, at_least, field_problems, unknown_name, within
from lightning_megatron.config.moe import MOE_RULES, MoEConfig
from lightning_megatron.errors import Problem, divisors, nearest_names, nearest_to, raise_if_any

NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swiglu")
GATED = frozenset({"swiglu"})
POSITION_EMBEDDINGS = ("learned", "rope", "none")

RULES: Rules = {
    "num_layers": at_least(1),
    "hidden_size": at_least(1),
    "num_attention_heads": at_least(1),
    "vocab_size": at_least(1),
    "max_position_embeddings": at_least(1),
    "ffn_hidden_size": at_least(0),
    "num_query_groups": at_least(0),
    "head_dim": at_least(0),
    "norm": OneOf(NORMS),
    "norm_epsilon": at_least(0.0),
    "activation": OneOf(ACTIVATIONS),
    "position_embedding": OneOf(POSITION_EMBEDDINGS),
    "rope_theta": above(0.0, 10000.0),
    "init_std": at_least(0.0),
    "hidden_dropout": within(0.0, 1.0),
    "attention_dropout": within(0.0, 1.0),
    "label_smoothing": within(0.0, 1.0),
    "vocab_multiple": at_least(1),
}
"""Rules for single fields, in addition to their types."""

ELSEWHERE = {
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "layernorm_epsilon": "norm_epsilon",
    "normalization": "norm",
    "hidden_act": "activation",
    "rotary_base": "rope_theta",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
    "init_method_std": "init_std",
    "num_local_experts": "num_experts",
    "num_moe_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "make_vocab_size_divisible_by": "vocab_multiple",
}
"""Our fields by their names in Hugging Face's and Megatron's configurations."""


def unknown_fields(given: Mapping[str, object]) -> list[Problem]:
    """Names that are no fields of :class:`TransformerConfig`."""
    known = [field.name for field in fields(TransformerConfig)]
    return [
        unknown_name(str(name), value, "field of TransformerConfig", known, ELSEWHERE)
        for name, value in given.items()
        if name not in known
    ]


@dataclass(frozen=True)
class RopeScaling:
    """LLaMA 3.1's rule: frequencies of long wavelength are slowed, short ones kept, and those between interpolated.

    Source: the published LLaMA 3.1 configuration (``rope_type: llama3``).

    Attributes:
        factor: factor by which low frequencies are slowed.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are slowed fully.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` are kept.
        original_max_position_embeddings: context length of the model's pretraining.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        found = field_problems(self, dict.fromkeys((field.name for field in fields(self)), above(0)))
        if not found and self.high_freq_factor <= self.low_freq_factor:
            reason = f"must be above low_freq_factor={self.low_freq_factor}"
            found.append(Problem("high_freq_factor", self.high_freq_factor, reason, (4 * self.low_freq_factor,)))
        return [replace(problem, argument=f"rope_scaling.{problem.argument}") for problem in found]

    def apply(self, frequencies: Tensor) -> Tensor:
        """Scaled frequencies, ``[D/2]``."""
        wavelength = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelength
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequencies * keep + frequencies / self.factor * (1 - keep)


@dataclass(frozen=True)
class TransformerConfig(MoEConfig):
    """The shape of a decoder-only transformer; :class:`MoEConfig` has the fields about experts.

    Attributes:
        num_layers: transformer blocks.
        hidden_size: features ``H`` between blocks.
        num_attention_heads: query heads.
        vocab_size: size of the vocabulary without padding, which depends on the layout.
        max_position_embeddings: longest sequence.
        ffn_hidden_size: features inside the feed-forward layer; ``None`` means ``4 hidden_size``.
        num_query_groups: key/value heads; ``None`` means one per query head.
        head_dim: features of a head; ``None`` means ``hidden_size / num_attention_heads``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        norm_epsilon: summand under the norm's root.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"swiglu"``.
        position_embedding: ``"learned"``, ``"rope"`` or ``"none"``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: LLaMA 3's rule, or ``None``; a dict of its fields is accepted too (YAML).
        add_bias_linear: True if linear layers have biases.
        tie_embeddings: True if the output layer is the embedding.
        init_std: standard deviation of initial weights; output projections get ``init_std / sqrt(2 num_layers)``.
        hidden_dropout: dropout probability of embeddings and of each sub-layer's output.
        attention_dropout: dropout probability of attention weights.
        label_smoothing: share ``s`` of the target's probability that goes to all ``V`` tokens equally, including the
            target: torch's definition. Megatron-LM's goes to the ``V - 1`` others; its ``s`` is ``s V / (V - 1)`` here.
        vocab_multiple: divisor of the padded vocabulary, times tp.
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
        # Fields that are not given are derived once, here: all others read numbers.
        found = self._value_problems()
        if isinstance(self.rope_scaling, Mapping):
            known = [f.name for f in fields(RopeScaling)]
            unknown = [name for name in self.rope_scaling if name not in known]
            found += [
                Problem(
                    f"rope_scaling[{name!r}]", self.rope_scaling[name], "no such field", nearest_names(str(name), known)
                )
                for name in unknown
            ]
            if not unknown:
                object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.rope_scaling, RopeScaling):
            found += self.rope_scaling.problems()
        raise_if_any(found)
        object.__setattr__(self, "moe_layers", tuple(self.moe_layers))
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        object.__setattr__(self, "num_query_groups", self.num_query_groups or self.num_attention_heads)
        if not self.head_dim and self.hidden_size % self.num_attention_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        raise_if_any(self._shape_problems())

    def _value_problems(self) -> list[Problem]:
        """Faults of single fields."""
        found = field_problems(self, {**RULES, **MOE_RULES}, leave=("rope_scaling",))
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling | Mapping):
            reason = "must be a RopeScaling, a mapping of its fields, or None"
            found.append(Problem("rope_scaling", self.rope_scaling, reason, (None,)))
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

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TransformerConfig:
        """The configuration with these fields.

        Raises:
            ConfigError: for names that are no fields and fields that are missing, or for their values.
        """
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        raise_if_any(
            unknown_fields(given)
            + [Problem(name, None, f"{cls.__name__} needs it") for name in missing if name not in given]
        )
        return cls(**given)

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
        raise_if_any(unknown_fields(overrides))
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
            active: True to count only the ``moe_router_topk`` experts of a token, and their rows of the router.
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

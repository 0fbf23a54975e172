"""The shape of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lightning_megatron.arguments import OneOf, Rules, above, at_least, field_problems, unknown_name, within
from lightning_megatron.config.attention import ATTENTION_RULES, SMALL_HEAD_DIM
from lightning_megatron.config.counts import LayerCounts
from lightning_megatron.config.layer_spec import LayerSpec
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.moe import MOE_RULES
from lightning_megatron.config.other_names import ELSEWHERE
from lightning_megatron.config.rope_scaling import DynamicScaling, RopeScaling, YarnScaling, rope_scaling_of
from lightning_megatron.config.score_rule import ScoreRule, alibi_slopes
from lightning_megatron.errors import Problem, divisors, nearest_to, raise_if_any

if TYPE_CHECKING:
    from typing_extensions import Self

NORMS = ("layernorm", "rmsnorm")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
SMALL_VOCABULARY = 512
"""Words of a small model."""
POSITION_EMBEDDINGS = ("learned", "rope", "alibi", "none")

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
    "swiglu_alpha": above(0.0, 1.702),
    "swiglu_limit": above(0.0, 7.0),
    "position_embedding": OneOf(POSITION_EMBEDDINGS),
    "rope_theta": above(0.0, 10000.0),
    "init_std": at_least(0.0),
    "hidden_dropout": within(0.0, 1.0),
    "attention_dropout": within(0.0, 1.0),
    "label_smoothing": within(0.0, 1.0),
    "vocab_multiple": at_least(1),
    "embedding_scale": above(0.0, 1.0),
    "logit_softcap": at_least(0.0),
    "mtp_num_layers": at_least(0),
    "mtp_loss_scaling_factor": at_least(0.0),
}
"""Rules for single fields, in addition to their types."""


def unknown_fields(given: Mapping[str, object], kind: type[TransformerConfig]) -> list[Problem]:
    """Names that are no fields of a class of configurations."""
    known = [field.name for field in fields(kind)]
    return [
        unknown_name(str(name), value, f"field of {kind.__name__}", known, ELSEWHERE)
        for name, value in given.items()
        if name not in known
    ]


class InitStds(NamedTuple):
    """Standard deviations of initial weights, by kind.

    Attributes:
        embedding: deviation of the tokens' embedding.
        qkv: deviation of queries, keys and values.
        out: deviation of the output of attention.
        fc1: deviation of the first matrix of the feed-forward layer.
        fc2: deviation of its second matrix.
        head: deviation of an output layer that is not tied.
    """

    embedding: float
    qkv: float
    out: float
    fc1: float
    fc2: float
    head: float


class Rotary(NamedTuple):
    """Angles of the rotary embedding of a layer.

    Attributes:
        theta: base of the frequencies.
        scaling: rule by which they are slowed, or ``None``.
    """

    theta: float
    scaling: RopeScaling | None


@dataclass(frozen=True)
class TransformerConfig(LayerCounts):
    """The shape of a decoder-only transformer; more fields are in the classes that it inherits from.

    Attributes:
        num_layers: transformer blocks.
        hidden_size: features ``H`` between blocks.
        num_attention_heads: query heads.
        vocab_size: size of the vocabulary without padding, which depends on the layout.
        max_position_embeddings: longest sequence.
        ffn_hidden_size: features inside the feed-forward layer; 0 means ``4 hidden_size``.
        num_query_groups: key/value heads; 0 means one per query head.
        head_dim: features of a head; 0 means ``hidden_size / num_attention_heads``.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        norm_epsilon: epsilon added under the norm's square root.
        norm_zero_centered: True if norms multiply by ``1 + weight``, so that weights begin at 0.
        post_norms: True to also norm the outputs of attention and the feed-forward layer before they are added.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"``, or gated: ``"swiglu"``, ``"geglu"``,
            ``"geglu_tanh"`` or ``"swiglu_clamped"`` (``gate sigmoid(alpha gate) (up + 1)`` of clamped values, gpt-oss).
        swiglu_alpha: ``alpha`` of ``"swiglu_clamped"``.
        swiglu_limit: maximum of the gate, and of the magnitude of up, in ``"swiglu_clamped"``.
        position_embedding: ``"learned"``, ``"rope"``, ``"alibi"`` (scores that fall with the distance,
            https://arxiv.org/abs/2108.12409) or ``"none"``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: rule of ``config/rope_scaling.py``, or ``None``; a dict of its fields is accepted too (YAML).
        add_bias_linear: True if linear layers have biases.
        tie_embeddings: True if the output layer is the embedding.
        embedding_norm: True for a norm after the token embedding (BLOOM).
        embedding_scale: factor of the embedded tokens; the output layer does not have it, tied or not.
        logit_softcap: bound of the logits, by the hyperbolic tangent; 0 for none.
        mtp_num_layers: modules after the last layer, each of which predicts one token further ahead in training
            (multi-token prediction, https://arxiv.org/abs/2412.19437); they share the embedding and the output layer.
        mtp_loss_scaling_factor: weight of the mean of their losses, each a mean over the tokens that are predicted.
        init_std: standard deviation of initial weights; output projections get ``init_std / sqrt(2 num_layers)``.
        hidden_dropout: dropout probability of embeddings and of each sub-layer's output.
        attention_dropout: dropout probability of attention weights.
        label_smoothing: share ``s`` of the target's probability that goes to all ``V`` tokens equally, including the
            target: torch's definition. Megatron-LM's goes to the ``V - 1`` others; its ``s`` is ``s V / (V - 1)`` here.
        vocab_multiple: padding multiple: the padded vocabulary is a multiple of this times tp.
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
    norm_zero_centered: bool = False
    post_norms: bool = False
    activation: str = "gelu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    position_embedding: str = "learned"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    add_bias_linear: bool = True
    tie_embeddings: bool = True
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    init_std: float = 0.02
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    label_smoothing: float = 0.0
    vocab_multiple: int = 128

    is_causal: ClassVar[bool] = True  # a position sees only those before it and itself
    _more_rules: ClassVar[Rules] = {}  # of the fields of a subclass

    def __post_init__(self) -> None:
        # Fields that are not given are derived once, here: all other code reads numbers.
        found = self._value_problems()
        scaling, faults = rope_scaling_of(self.rope_scaling)
        object.__setattr__(self, "rope_scaling", scaling)
        raise_if_any(found + faults)
        for name in ("moe_layers", "sliding_window_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "ffn_hidden_size", self.ffn_hidden_size or 4 * self.hidden_size)
        object.__setattr__(self, "num_query_groups", self.num_query_groups or self.num_attention_heads)
        if not self.head_dim and self.hidden_size % self.num_attention_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        raise_if_any(self._shape_problems())

    def _value_problems(self) -> list[Problem]:
        """Faults of single fields."""
        return field_problems(
            self, {**RULES, **ATTENTION_RULES, **MOE_RULES, **self._more_rules}, leave=("rope_scaling",)
        )

    def _shape_problems(self) -> list[Problem]:
        """Faults of fields that must fit together."""
        heads, groups, layers = self.num_attention_heads, self.num_query_groups, self.num_layers
        found = self.moe_problems() + self.attention_problems(layers) + self._unknown_moe_layers(layers)
        if self.num_experts and self.add_bias_linear:
            reason = "with experts, biases are chosen by add_qkv_bias, add_attention_out_bias and moe_linear_bias"
            found.append(Problem("add_bias_linear", True, reason, (False,)))
        if not self.head_dim:
            near = nearest_to(heads, divisors(self.hidden_size))
            reason = f"hidden_size={self.hidden_size} does not split over the heads, and head_dim is not given"
            found.append(Problem("num_attention_heads", heads, reason, near))
        elif self.position_embedding == "rope" and self.head_dim % 2 and not self.rope_head_dim:
            near = nearest_to(self.head_dim, (self.head_dim - 1, self.head_dim + 1))
            found.append(Problem("head_dim", self.head_dim, "rotary embedding rotates pairs of features", near))
        if isinstance(self.rope_scaling, DynamicScaling) and self.rotary_dim == 2:
            name = "rope_head_dim" if self.rope_head_dim else "head_dim"
            found.append(Problem(name, 2, f"dynamic scaling divides by {name} - 2", (4,)))
        if heads % groups:
            reason = f"num_attention_heads={heads} does not split into groups of equal size"
            found.append(Problem("num_query_groups", groups, reason, nearest_to(groups, divisors(heads))))
        if self.mtp_num_layers and (self.position_embedding == "learned" or self.embedding_norm):
            reason = "the last stage embeds tokens by their table alone: it has no learned positions and no norm"
            found.append(Problem("mtp_num_layers", self.mtp_num_layers, reason, (0,)))
        return found + (self._latent_problems() if self.has_latents else self._partial_rotation_problems())

    def _partial_rotation_problems(self) -> list[Problem]:
        """Faults of a number of rotated features, without latents."""
        found, turned = [], self.rope_head_dim
        if turned and self.position_embedding != "rope":
            reason = f"position_embedding={self.position_embedding!r} rotates no features"
            found.append(Problem("rope_head_dim", turned, reason, (0,)))
        if 0 < self.head_dim < turned:
            reason = f"is more than head_dim={self.head_dim}: 0 rotates all features of a head"
            found.append(Problem("rope_head_dim", turned, reason, (0,)))
        return found

    def _latent_problems(self) -> list[Problem]:
        """Faults of sizes with latents."""
        found = []
        if self.num_query_groups != self.num_attention_heads:
            reason = "with latents (kv_lora_rank) every query head has its own key and value head"
            found.append(Problem("num_query_groups", self.num_query_groups, reason, (self.num_attention_heads,)))
        if self.position_embedding != "rope":
            reason = "with latents (kv_lora_rank) a part of each key is rotated"
            found.append(Problem("position_embedding", self.position_embedding, reason, ("rope",)))
        if self.head_dim and self.rope_head_dim >= self.head_dim:
            reason = f"is a part of head_dim={self.head_dim}, and the other part comes from the latent"
            found.append(Problem("rope_head_dim", self.rope_head_dim, reason, (self.head_dim // 2,)))
        return found

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The configuration with these fields.

        Raises:
            ConfigError: for names that are no fields and fields that are missing, or for their values.
        """
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        raise_if_any(
            unknown_fields(given, cls)
            + [Problem(name, None, f"{cls.__name__} needs it") for name in missing if name not in given]
        )
        return cls(**given)

    def rotary(self, layer: int) -> Rotary | None:
        """Angles of the rotary embedding in the layer of that number; ``None`` without one."""
        if self.position_embedding != "rope":
            return None
        if self.rope_local_theta and self.window(layer):
            return Rotary(self.rope_local_theta, None)
        return Rotary(self.rope_theta, self.rope_scaling)

    @property
    def query_factor(self) -> float:
        """Factor of the queries that makes softmax sharper with YaRN, for attention with latents.

        Other attention has it in the cosines and sines; with latents these rotate only a part of the features.
        """
        scaling = self.rope_scaling if self.has_latents else None
        if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
            return 1.0
        return scaling.sharpness(scaling.mscale_all_dim) ** 2

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the layers that write to the residual stream (GPT-2's rule)."""
        return float(self.init_std / (2 * self.num_layers) ** 0.5)

    @property
    def init_stds(self) -> InitStds:
        """Standard deviations of initial weights."""
        std, out = self.init_std, self.output_init_std
        return InitStds(embedding=std, qkv=std, out=out, fc1=std, fc2=out, head=std)

    @property
    def stacks(self) -> Mapping[str, range]:
        """Numbers of the layers of each stack: one without a name, and ``mtp`` for multi-token prediction."""
        return {"": range(self.num_layers), "mtp": range(self.mtp_num_layers)}

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The parts of each layer."""
        return tuple(self.layer_spec(number) for number in range(self.num_layers))

    def layer_spec(self, layer: int) -> LayerSpec:
        """The parts of the layer of that number; a subclass may name others."""
        return LayerSpec(self.attention, self.feed_forward(layer), self.window(layer))

    def layout_problems(self, layout: ParallelLayout) -> list[Problem]:
        """Faults of a layout for this kind of model, beside those of its sizes."""
        return []

    def replace(self, **overrides: Any) -> Self:
        """A copy with some fields changed; what was derived from a changed field is derived again.

        With fewer layers, those that are left keep their windows and their experts.

        Raises:
            ConfigError: for a name that is no field.
        """
        raise_if_any(unknown_fields(overrides, type(self)))
        if "hidden_size" in overrides:
            if self.ffn_hidden_size == 4 * self.hidden_size:
                overrides.setdefault("ffn_hidden_size", 0)
            if not self.has_latents:
                overrides.setdefault("head_dim", 0)
            if self.embedding_scale == self.hidden_size**0.5:
                overrides.setdefault("embedding_scale", overrides["hidden_size"] ** 0.5)
        if left := [number for number in self.sliding_window_layers if number < overrides.get("num_layers", 0)]:
            overrides.setdefault("sliding_window_layers", tuple(left))
        if left := [number for number in self.moe_layers if number < overrides.get("num_layers", 0)]:
            overrides.setdefault("moe_layers", tuple(left))
        if "num_attention_heads" in overrides:
            if not self.has_latents:
                overrides.setdefault("head_dim", 0)
            if self.num_query_groups == self.num_attention_heads:
                overrides.setdefault("num_query_groups", 0)
        return replace(self, **overrides)

    def small(self, layout: ParallelLayout, seq_length: int) -> Self:
        """A model of the same kind with the smallest sizes that a layout divides.

        It has few heads, features, experts and words, and two layers or one for each stage. Dropout is off, since
        replicas draw different random numbers.

        Args:
            seq_length: longest sequence.
        """
        groups = layout.tp * layout.cp  # all-to-all shares the heads over cp too
        heads = groups if self.num_query_groups == self.num_attention_heads else 2 * groups
        layers, hidden = max(2, layout.pp * layout.vpp), heads * SMALL_HEAD_DIM
        changes: dict[str, Any] = {
            "num_layers": layers,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "hidden_size": hidden,
            "ffn_hidden_size": 2 * hidden,
            "vocab_size": SMALL_VOCABULARY,
            "vocab_multiple": 1,
            "max_position_embeddings": seq_length,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        changes |= self.small_attention(layers, seq_length) | self.small_experts(layout.ep, layers, 2 * hidden)
        return self.replace(**changes)

    @property
    def embeds_in_the_end(self) -> bool:
        """True if the last stage needs the token embedding, too."""
        return self.tie_embeddings or self.mtp_num_layers > 0

    def score_rule(self, layer: int) -> ScoreRule:
        """The rule of attention scores in the layer of that number, of all heads."""
        rule = super().score_rule(layer)
        if self.position_embedding != "alibi":
            return rule
        return replace(rule, slopes=alibi_slopes(self.num_attention_heads))

    def blockwise_share(self, length: int) -> float:
        """Share of the layers whose attention no fused kernel computes for sequences of ``length``."""
        kinds = self.attention_kinds(self.num_layers)
        return sum(c for n, c in kinds.items() if not self.score_rule(n).is_plain(length)) / self.num_layers

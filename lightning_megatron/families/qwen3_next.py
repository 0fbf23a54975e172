"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and experts with a gated shared one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_megatron.arguments import OneOf, Rules, at_least
from lightning_megatron.config.attention import SMALL_HEAD_DIM
from lightning_megatron.config.hugging_face.decoder import decoder_from_hf
from lightning_megatron.config.hugging_face.family import Family, Recipe
from lightning_megatron.config.hugging_face.rope import rope_from_hf, share_to_hf
from lightning_megatron.config.hugging_face.tensors import GROUPED, STACKED, RowGroups, Tensors, in_layers, rule
from lightning_megatron.config.layer_spec import LayerSpec
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.config.transformer import Rotary, TransformerConfig
from lightning_megatron.errors import Problem, divisors, nearest_to
from lightning_megatron.families.llama import QK_NORMS
from lightning_megatron.families.qwen3 import attention_to_hf
from lightning_megatron.families.qwen3_moe import EXPERTS, qwen_experts_from_hf, qwen_experts_to_hf

if TYPE_CHECKING:
    from typing_extensions import Self

ARCHITECTURE = "Qwen3NextForCausalLM"
_LINEAR, _FULL = "linear_attention", "full_attention"
_MIXERS = "lightning_megatron.layers.recurrence.gated_delta_net"


@dataclass(frozen=True)
class Qwen3NextConfig(TransformerConfig):
    """The shape of a decoder with a gated delta net (https://arxiv.org/abs/2412.06464) in some layers.

    The other layers have attention with a gate on its output, and each shared expert has a gate. Fields are those of
    :class:`TransformerConfig`, with Qwen3-Next's own defaults, and these.

    Attributes:
        model_type: name of this class among the fields of a checkpoint; always ``"qwen3_next"``.
        delta_layers: numbers of the layers with a gated delta net.
        delta_key_heads: heads of its queries and keys.
        delta_value_heads: heads of its values, a multiple.
        delta_key_dim: features of a query and a key.
        delta_value_dim: features of a value.
        delta_conv_size: tokens that its convolution sees.
    """

    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-6
    norm_zero_centered: bool = True
    activation: str = "swiglu"
    position_embedding: str = "rope"
    add_bias_linear: bool = False
    tie_embeddings: bool = False
    model_type: str = "qwen3_next"
    delta_layers: tuple[int, ...] = ()
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_key_dim: int = 128
    delta_value_dim: int = 128
    delta_conv_size: int = 4
    qk_norm: bool = field(default=True, kw_only=True)

    _more_rules: ClassVar[Rules] = {
        "model_type": OneOf(("qwen3_next",)),
        "delta_key_heads": at_least(1),
        "delta_value_heads": at_least(1),
        "delta_key_dim": at_least(1),
        "delta_value_dim": at_least(1),
        "delta_conv_size": at_least(1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "delta_layers", tuple(self.delta_layers))

    def _shape_problems(self) -> list[Problem]:
        found = super()._shape_problems()
        beyond = [number for number in self.delta_layers if not 0 <= number < self.num_layers]
        if beyond:
            found.append(Problem("delta_layers", beyond, f"layers are numbered 0 to {self.num_layers - 1}"))
        if self.delta_value_heads % self.delta_key_heads:
            reason = f"delta_value_heads={self.delta_value_heads} do not split over the key heads"
            near = nearest_to(self.delta_key_heads, divisors(self.delta_value_heads))
            found.append(Problem("delta_key_heads", self.delta_key_heads, reason, near))
        for name in ("kv_lora_rank", "sliding_window"):
            if getattr(self, name):
                found.append(Problem(name, getattr(self, name), "not what Qwen3-Next computes", (0,)))
        return found

    def replace(self, **overrides: Any) -> Self:
        """A copy with some fields changed; with fewer layers, those that are left keep their kind."""
        layers = overrides.get("num_layers", self.num_layers)
        overrides.setdefault("delta_layers", tuple(number for number in self.delta_layers if number < layers))
        return super().replace(**overrides)

    def small(self, layout: ParallelLayout, seq_length: int) -> Self:
        """A model of the same kind with the smallest sizes that a layout divides; its last layer has attention."""
        found = super().small(layout, seq_length)
        return found.replace(
            delta_layers=tuple(range(found.num_layers - 1)) if self.delta_layers else (),
            delta_key_heads=layout.tp,
            delta_value_heads=2 * layout.tp,
            delta_key_dim=SMALL_HEAD_DIM // 2,
            delta_value_dim=SMALL_HEAD_DIM // 2,
        )

    def rotary(self, layer: int) -> Rotary | None:
        """Angles of the rotary embedding; ``None`` for a gated delta net."""
        return None if layer in self.delta_layers else super().rotary(layer)

    def layer_spec(self, layer: int) -> LayerSpec:
        """The parts of the layer of that number."""
        mixer = "GatedDeltaNet" if layer in self.delta_layers else "GatedAttention"
        has_gate = self.has_experts(layer) and self.moe_shared_expert_ffn_hidden_size
        feed_forward = "lightning_megatron.moe.gated_shared:GatedSharedMoE" if has_gate else self.feed_forward(layer)
        return LayerSpec(f"{_MIXERS}:{mixer}", feed_forward)

    def mixer_parameters(self, layer: int) -> int:
        """Parameters of the mixer in the layer of that number, without the block's norms."""
        if layer in self.delta_layers:
            return self.mixer_matrices(layer) + 2 * self.delta_value_heads + self.delta_value_dim
        heads = self.num_attention_heads * self.head_dim
        return super().mixer_parameters(layer) + heads * (self.hidden_size + self.has_qkv_bias)

    def mixer_matrices(self, layer: int) -> int:
        """Elements of the mixer's matrices that a token is multiplied by, the convolution's included."""
        if layer not in self.delta_layers:
            return super().mixer_matrices(layer) + self.num_attention_heads * self.head_dim * self.hidden_size
        keys, values = self.delta_key_heads * self.delta_key_dim, self.delta_value_heads * self.delta_value_dim
        projections = self.hidden_size * (2 * keys + 3 * values + 2 * self.delta_value_heads)
        return projections + (2 * keys + values) * self.delta_conv_size

    def mixer_products(self, layer: int, length: int) -> float:
        """Multiplications per token: of a gated delta net, what the recurrence reads and writes, for any length."""
        if layer in self.delta_layers:
            return 3.0 * self.delta_value_heads * self.delta_key_dim * self.delta_value_dim
        return super().mixer_products(layer, length)

    def feed_forward_parameters(self, layer: int, *, active: bool = False) -> int:
        """Parameters of the feed-forward part, or those that serve one token."""
        return super().feed_forward_parameters(layer, active=active) + self._shared_gate(layer)

    def feed_forward_matrices(self, layer: int) -> int:
        """Elements of the feed-forward part's matrices that a token is multiplied by."""
        return super().feed_forward_matrices(layer) + self._shared_gate(layer)

    def _shared_gate(self, layer: int) -> int:
        return self.hidden_size if self.has_experts(layer) and self.moe_shared_expert_ffn_hidden_size else 0


def _from_hf(reader: ConfigReader) -> dict[str, Any]:
    found = decoder_from_hf(reader, angles=partial(rope_from_hf, share=0.25))
    layers, bias = found["num_layers"], reader.get("attention_bias", False)
    found |= {"add_qkv_bias": bias, "add_attention_out_bias": bias} | qwen_experts_from_hf(reader, layers)
    shared = reader.get("shared_expert_intermediate_size", 512)
    if "num_experts" in found:
        found["moe_shared_expert_ffn_hidden_size"] = shared
        if shared < 1:
            reader.refuse("shared_expert_intermediate_size", shared, "every layer with experts has a shared one", (1,))
    return found | {
        "delta_layers": _delta_layers(reader, layers),
        "delta_key_heads": reader.get("linear_num_key_heads", 16),
        "delta_value_heads": reader.get("linear_num_value_heads", 32),
        "delta_key_dim": reader.get("linear_key_head_dim", 128),
        "delta_value_dim": reader.get("linear_value_head_dim", 128),
        "delta_conv_size": reader.get("linear_conv_kernel_dim", 4),
    }


def _delta_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Numbers of the layers with a gated delta net."""
    kinds, interval = reader.get("layer_types", None), reader.get("full_attention_interval", 4)
    if interval < 1:
        reader.refuse("full_attention_interval", interval, "must be at least 1", (4,))
    elif kinds is None:
        return tuple(number for number in range(layers) if (number + 1) % interval)
    elif isinstance(kinds, list) and len(kinds) == layers and {*kinds} <= {_LINEAR, _FULL}:
        return tuple(number for number, kind in enumerate(kinds) if kind == _LINEAR)
    else:
        reader.refuse("layer_types", kinds, f"must be a list of {layers} words: {_LINEAR}, {_FULL}", (None,))
    return ()


def _to_hf(reader: ConfigReader) -> dict[str, Any]:
    found = attention_to_hf(reader, ARCHITECTURE) | qwen_experts_to_hf(reader, ARCHITECTURE)
    reader.expect("norm_zero_centered", None, (True,), f"not what {ARCHITECTURE} computes")
    shared, delta = reader["moe_shared_expert_ffn_hidden_size"], reader["delta_layers"]
    if not shared:
        reader.refuse("moe_shared_expert_ffn_hidden_size", 0, f"{ARCHITECTURE} has a shared expert")
    return found | {
        "shared_expert_intermediate_size": shared,
        **share_to_hf(reader),
        "layer_types": [_LINEAR if number in delta else _FULL for number in range(reader["num_layers"])],
        "linear_num_key_heads": reader["delta_key_heads"],
        "linear_num_value_heads": reader["delta_value_heads"],
        "linear_key_head_dim": reader["delta_key_dim"],
        "linear_value_head_dim": reader["delta_value_dim"],
        "linear_conv_kernel_dim": reader["delta_conv_size"],
    }


def _of_attention(config: Qwen3NextConfig) -> RowGroups:
    """Queries with their gates, key and value of a query group."""
    groups, dim = config.num_query_groups, config.head_dim
    return RowGroups(groups, (2 * config.num_attention_heads // groups * dim, dim, dim))


def _of_convolution(config: Qwen3NextConfig) -> RowGroups:
    """Features of queries, keys and values for a key head."""
    keys = config.delta_key_heads
    return RowGroups(
        keys, (config.delta_key_dim, config.delta_key_dim, config.delta_value_heads // keys * config.delta_value_dim)
    )


TENSORS = Tensors(
    (
        rule("embedding.word.weight", "model.embed_tokens.weight", tied="lm_head.weight"),
        *in_layers(
            "layers.{n}.",
            "model.layers.{n}.",
            rule("attention_norm.weight", "input_layernorm.weight"),
            rule(
                "attention.qkv.{kind}",
                *(f"self_attn.{part}_proj.{{kind}}" for part in "qkv"),
                kind=GROUPED,
                groups=_of_attention,
            ),
            rule("attention.out.{kind}", "self_attn.o_proj.{kind}"),
            rule("attention.qkvz.weight", "linear_attn.in_proj_qkvz.weight"),
            rule("attention.ba.weight", "linear_attn.in_proj_ba.weight"),
            rule("attention.conv", "linear_attn.conv1d.weight", kind=GROUPED, groups=_of_convolution),
            rule("attention.a_log", "linear_attn.A_log"),
            rule("attention.dt_bias", "linear_attn.dt_bias"),
            rule("attention.norm.weight", "linear_attn.norm.weight"),
            rule("attention.projection.weight", "linear_attn.out_proj.weight"),
            rule("mlp.fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind=STACKED),
            rule("mlp.fc2.weight", "mlp.down_proj.weight"),
            rule(
                "mlp.shared.fc1.weight",
                "mlp.shared_expert.gate_proj.weight",
                "mlp.shared_expert.up_proj.weight",
                kind=STACKED,
            ),
            rule("mlp.shared.fc2.weight", "mlp.shared_expert.down_proj.weight"),
            rule("mlp.shared.gate.weight", "mlp.shared_expert_gate.weight"),
            rule("mlp_norm.weight", "post_attention_layernorm.weight"),
        ),
        rule("head.norm.weight", "model.norm.weight"),
        rule("head.weight", "lm_head.weight"),
    )
).plus(*QK_NORMS, *EXPERTS)


def _qwen3_next(layers: int, hidden: int, heads: int, groups: int, vocab: int, positions: int, **other: Any) -> Recipe:
    usual: dict[str, Any] = {
        "num_query_groups": groups,
        "delta_layers": tuple(number for number in range(layers) if (number + 1) % 4),
        "moe_aux_loss_coeff": 0.001 * other["moe_router_topk"] / layers,
    }
    return partial(Qwen3NextConfig, layers, hidden, heads, vocab, positions, **usual | other)


_TINY = {"delta_key_heads": 4, "delta_value_heads": 8, "delta_key_dim": 32, "delta_value_dim": 32}
# config.json of https://huggingface.co/Qwen.
PRESETS = {
    "qwen3-next-tiny": _qwen3_next(
        *(4, 256, 8, 4, 32000, 2048),
        ffn_hidden_size=768,
        head_dim=48,
        rope_head_dim=12,
        num_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=128,
        moe_shared_expert_ffn_hidden_size=128,
        **_TINY,
    ),
    "qwen3-next-80b-a3b": _qwen3_next(
        *(48, 2048, 16, 2, 151936, 262144),
        ffn_hidden_size=5120,
        head_dim=256,
        rope_head_dim=64,
        rope_theta=1e7,
        num_experts=512,
        moe_router_topk=10,
        moe_ffn_hidden_size=512,
        moe_shared_expert_ffn_hidden_size=512,
    ),
}

FAMILY = Family(
    "qwen3_next",
    ARCHITECTURE,
    _from_hf,
    _to_hf,
    TENSORS,
    PRESETS,
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    passive=frozenset({"output_router_logits"}),
    config_class=Qwen3NextConfig,
)

"""Configuration of the parts of attention that only some models, or some layers, have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.arguments import Rules, at_least
from lightning_megatron.config.layer_spec import below
from lightning_megatron.config.score_rule import ScoreRule
from lightning_megatron.errors import Problem

ATTENTION_RULES: Rules = {
    "sliding_window": at_least(0),
    "attention_scale": at_least(0.0),
    "attention_softcap": at_least(0.0),
    "rope_local_theta": at_least(0.0),
    "kv_lora_rank": at_least(0),
    "q_lora_rank": at_least(0),
    "rope_head_dim": at_least(0),
    "v_head_dim": at_least(0),
}
"""Rules for single fields, in addition to their types."""
SMALL_HEAD_DIM = 16
"""Features of a head in a small model."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The attention of a transformer, where it differs from that of GPT and LLaMA.

    Attributes:
        add_qkv_bias: True if queries, keys and values have biases, also where ``add_bias_linear`` is False (Qwen2).
        add_attention_out_bias: True if the output of attention has biases, also where ``add_bias_linear`` is False.
        qk_norm: True for a norm of each query and key head, before the rotary embedding (Qwen3).
        sliding_window: number of tokens that a token sees, itself included (https://arxiv.org/abs/2310.06825); 0 for
            all that precede it.
        sliding_window_layers: numbers of the layers that have this window; empty for all.
        attention_scale: factor of the products of queries and keys; 0 for ``1 / sqrt(head_dim)``.
        attention_softcap: bound of the scores, by the hyperbolic tangent (https://arxiv.org/abs/2408.00118); 0 for
            none.
        attention_sinks: True if each head learns a score that takes a share of the weights and has no value
            (https://arxiv.org/abs/2309.17453, section 3.3).
        rope_local_theta: base of the rotary frequencies in layers with a window, to which ``rope_scaling`` does not
            apply; 0 for the base and scaling of all layers.
        kv_lora_rank: features of the latent from which keys and values are made (multi-head latent attention,
            https://arxiv.org/abs/2405.04434); 0 for attention without latents. With latents ``add_qkv_bias`` is for
            the projections to them.
        q_lora_rank: features of the latent from which queries are made; 0 for queries from the tokens themselves.
        rope_head_dim: rotated features of a query and a key, out of ``head_dim``: with latents the last ones, without
            latents the first ones; 0 for all, without latents.
        v_head_dim: features of a value; 0 for ``head_dim``. Another number needs latents.
    """

    add_qkv_bias: bool = False
    add_attention_out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    sliding_window_layers: tuple[int, ...] = field(default=())
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    rope_local_theta: float = 0.0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def has_latents(self) -> bool:
        """True if keys and values are made from latents."""
        return self.kv_lora_rank > 0

    @property
    def attention(self) -> str:
        """Class of attention, as ``module:name``."""
        kind = "latent_attention:LatentAttention" if self.has_latents else "attention:SelfAttention"
        return f"lightning_megatron.layers.{kind}"

    def window(self, layer: int) -> int:
        """Number of tokens that a token sees in the layer of that number; 0 for all that precede it."""
        everywhere = not self.sliding_window_layers
        return self.sliding_window if everywhere or layer in self.sliding_window_layers else 0

    def attention_kinds(self, num_layers: int) -> dict[int, int]:
        """The first layer of each kind of attention, with the number of layers of that kind."""
        windowed = sorted(set(self.sliding_window_layers))
        if not windowed or len(windowed) == num_layers:
            return {0: num_layers}
        first = next(number for number in range(num_layers) if number not in self.sliding_window_layers)
        return {first: num_layers - len(windowed), windowed[0]: len(windowed)}

    def score_rule(self, layer: int) -> ScoreRule:
        """The rule of attention scores in the layer of that number."""
        return ScoreRule(self.attention_scale, self.attention_softcap, self.window(layer), self.attention_sinks)

    def seen(self, layer: int, length: int) -> float:
        """Mean number of tokens that a token sees in a layer, in sequences of ``length``; itself counts half."""
        window = self.window(layer)
        return window - window**2 / (2 * length) if 0 < window < length else length / 2

    def small_attention(self, layers: int, seq_length: int) -> dict[str, Any]:
        """Fields of the same attention in a model of few features.

        Args:
            layers: number of layers of that model.
            seq_length: tokens of its sequences.
        """
        found: dict[str, Any] = {"head_dim": SMALL_HEAD_DIM}
        if self.has_latents:
            found |= {"kv_lora_rank": SMALL_HEAD_DIM, "v_head_dim": SMALL_HEAD_DIM}
            found["q_lora_rank"] = SMALL_HEAD_DIM if self.q_lora_rank else 0
        if self.rope_head_dim:
            found["rope_head_dim"] = SMALL_HEAD_DIM // 2
        if self.sliding_window:
            found["sliding_window"] = min(self.sliding_window, seq_length // 4)
            found["sliding_window_layers"] = below(layers, self.sliding_window_layers)
        return found

    def attention_problems(self, num_layers: int) -> list[Problem]:
        """Faults of fields that must fit together."""
        found = []
        beyond = [number for number in self.sliding_window_layers if not 0 <= number < num_layers]
        if beyond:
            found.append(Problem("sliding_window_layers", beyond, f"layers are numbered 0 to {num_layers - 1}"))
        if self.sliding_window_layers and not self.sliding_window:
            reason = "layers are named, and there is no window: give sliding_window, or leave them out"
            found.append(Problem("sliding_window_layers", self.sliding_window_layers, reason, ((),)))
        if self.rope_local_theta and not self.sliding_window:
            reason = "is the base in layers with a window, and there is none: set rope_theta, or sliding_window"
            found.append(Problem("rope_local_theta", self.rope_local_theta, reason, (0.0,)))
        if self.rope_head_dim % 2 or self.rope_head_dim < 2 * self.has_latents:
            reason = "the rotary embedding rotates pairs of features: give an even number of at least 2"
            found.append(Problem("rope_head_dim", self.rope_head_dim, reason, (max(2, self.rope_head_dim // 2 * 2),)))
        return found + (self._misfits_of_latents() if self.has_latents else self._latents_without_rank())

    def _latents_without_rank(self) -> list[Problem]:
        """Fields for latents that are given without ``kv_lora_rank``."""
        reason = "needs latents: give kv_lora_rank, or leave it out"
        names = ("q_lora_rank", "v_head_dim")
        return [Problem(name, value, reason, (0,)) for name in names if (value := getattr(self, name))]

    def _misfits_of_latents(self) -> list[Problem]:
        """Parts of attention that latents do not support."""
        given = {"qk_norm": self.qk_norm, "attention_sinks": self.attention_sinks}
        reason = f"latents (kv_lora_rank={self.kv_lora_rank}) do not support it"
        return [Problem(name, True, reason, (False,)) for name, is_on in given.items() if is_on]

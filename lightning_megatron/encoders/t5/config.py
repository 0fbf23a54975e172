"""The shape of T5 (https://arxiv.org/abs/1910.10683): an encoder, and a decoder with cross-attention to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_megatron.arguments import OneOf, Rules, at_least
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import InitStds, TransformerConfig
from lightning_megatron.errors import Problem, nearest_to

if TYPE_CHECKING:
    from typing_extensions import Self

_FREE = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "activation"}
_FREE |= {"ffn_hidden_size", "num_query_groups", "head_dim", "norm_epsilon", "init_std", "tie_embeddings"}
_FREE |= {"hidden_dropout", "attention_dropout", "label_smoothing", "vocab_multiple"}
_FREE |= {"num_decoder_layers", "relative_buckets", "relative_distance"}
"""Fields that may have other values than their defaults."""
_FEWEST_BUCKETS = 4


@dataclass(frozen=True)
class T5Config(TransformerConfig):
    """The shape of an encoder and a decoder, with relative positions and scores that are not scaled.

    Fields are those of :class:`TransformerConfig`, with T5's own defaults, and these. Layers are numbered through both
    stacks, the encoder's first, so that a pipeline is cut as any other. With tied embeddings the output layer's input
    is divided by ``sqrt(hidden_size)``, as T5 1.0 has it; T5 1.1 has an output layer of its own.

    Attributes:
        num_layers: blocks of both stacks together.
        max_position_embeddings: longest sequence of either stack; no weight depends on it.
        init_std: factor of T5's standard deviations of initial weights, one for each kind of weight.
        model_type: name of this class among the fields of a checkpoint; always ``"t5"``.
        num_decoder_layers: blocks of the decoder; 0 for half of them.
        relative_buckets: buckets of distances between query and key, each with one bias per head; the layers of a stack
            share them.
        relative_distance: distance from which on all are in one bucket.
    """

    norm: str = "rmsnorm"
    norm_epsilon: float = 1e-6
    activation: str = "relu"
    position_embedding: str = "none"
    add_bias_linear: bool = False
    init_std: float = 1.0
    model_type: str = "t5"
    num_decoder_layers: int = 0
    relative_buckets: int = 32
    relative_distance: int = 128
    attention_scale: float = field(default=1.0, kw_only=True)

    is_causal: ClassVar[bool] = False  # in the decoder the biases mask later tokens
    _more_rules: ClassVar[Rules] = {
        "model_type": OneOf(("t5",)),
        "num_layers": at_least(2),
        "num_decoder_layers": at_least(0),
        "relative_buckets": at_least(_FEWEST_BUCKETS),
        "relative_distance": at_least(1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_decoder_layers", self.num_decoder_layers or self.num_layers // 2)

    def _shape_problems(self) -> list[Problem]:
        found = super()._shape_problems()
        for each in fields(self):
            value = getattr(self, each.name)
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name not in _FREE and value != usual:
                found.append(Problem(each.name, value, "not what T5 computes", (usual,)))
        heads, layers, of_decoder = self.num_attention_heads, self.num_layers, self.num_decoder_layers
        if self.num_query_groups != heads:
            found.append(
                Problem("num_query_groups", self.num_query_groups, "T5 has one key head per query head", (heads,))
            )
        if not of_decoder and layers % 2:
            reason = "an odd number cannot be halved for the two stacks: give num_decoder_layers"
            found.append(Problem("num_layers", layers, reason, nearest_to(layers, (layers - 1, layers + 1))))
        if of_decoder >= layers:
            reason = f"leaves no layer for the encoder: num_layers={layers} counts both stacks"
            found.append(Problem("num_decoder_layers", of_decoder, reason, (layers - 1, 0)))
        if self.relative_buckets % 2:
            near = nearest_to(self.relative_buckets, (self.relative_buckets - 1, self.relative_buckets + 1))
            found.append(Problem("relative_buckets", self.relative_buckets, "must be even, half for each side", near))
        if self.relative_distance <= self.relative_buckets // 2:
            reason = f"must be higher: half of relative_buckets={self.relative_buckets} are for one distance each"
            found.append(Problem("relative_distance", self.relative_distance, reason, (4 * self.relative_buckets,)))
        return found

    def layout_problems(self, layout: ParallelLayout) -> list[Problem]:
        """Faults of a layout for this model: relative-position biases are added to whole rows of scores."""
        if layout.cp == 1:
            return []
        reason = (
            "T5's relative positions are added to the scores of whole sequences, which context-parallel ranks do not"
            " have: raise tp, with sequence parallelism, or pp"
        )
        return [Problem("cp", layout.cp, reason, (1,))]

    @property
    def num_encoder_layers(self) -> int:
        """Blocks of the encoder, which are the first ones."""
        return self.num_layers - self.num_decoder_layers

    @property
    def stacks(self) -> Mapping[str, range]:
        """Numbers of the layers of each stack."""
        cut = self.num_encoder_layers
        return {"encoder": range(cut), "decoder": range(cut, self.num_layers)}

    @property
    def init_stds(self) -> InitStds:
        """Standard deviations of initial weights: inputs of a matrix of unit variance give outputs of unit variance.

        The model scales initial queries by ``1 / sqrt(head_dim)``, as it does not scale scores.
        """
        std, h = self.init_std, self.hidden_size
        inner = self.num_attention_heads * self.head_dim
        return InitStds(
            embedding=std,
            qkv=std * h**-0.5,
            out=std * inner**-0.5,
            fc1=std * h**-0.5,
            fc2=std * self.ffn_hidden_size**-0.5,
            head=std,
        )

    def replace(self, **overrides: Any) -> Self:
        """A copy with some fields changed; a decoder with half of the layers keeps half of a new number."""
        if "num_layers" in overrides and 2 * self.num_decoder_layers == self.num_layers:
            overrides.setdefault("num_decoder_layers", 0)
        return super().replace(**overrides)

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters of the model, vocabulary padding not counted."""
        biases = 2 * self.relative_buckets * self.num_attention_heads
        cross = self.num_decoder_layers * (self.attention_weights + self.hidden_size)
        return super().num_parameters(active=active) + cross + biases + self.hidden_size

    def flops_per_token(self, seq_length: int, decoder_length: int | None = None) -> float:
        """Matmul FLOPs of forward and backward per encoder token; the decoder's are divided over the encoder's tokens.

        Args:
            seq_length: tokens of the encoder.
            decoder_length: tokens of the decoder; ``None`` for ``seq_length``.
        """
        length = seq_length if decoder_length is None else decoder_length
        share = length / seq_length if seq_length else 1.0
        h, inner = self.hidden_size, self.num_attention_heads * self.head_dim
        block = self.attention_weights + self._feed_forward_weights(self.ffn_hidden_size)
        encoder = self.num_encoder_layers * (block + inner * 2 * seq_length)
        memory = self.num_decoder_layers * 2 * h * inner  # keys and values for the decoder
        seen = 2 * inner * (length / 2 + seq_length)
        decoder = self.num_decoder_layers * (block + 2 * h * inner + seen) + h * self.vocab_size
        return 6.0 * (encoder + memory + share * decoder)

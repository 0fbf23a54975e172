"""The shape of BERT (https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from lightning_megatron.arguments import OneOf, Rules, at_least
from lightning_megatron.config.counts import GATED
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem

NORM_POSITIONS = ("after", "before")
_TAKEN = {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "activation"}
_TAKEN |= {"ffn_hidden_size", "num_query_groups", "head_dim", "norm", "norm_epsilon", "add_bias_linear", "init_std"}
_TAKEN |= {"tie_embeddings", "hidden_dropout", "attention_dropout", "label_smoothing", "vocab_multiple"}
"""Fields of other transformers that BERT has, too."""


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """The shape of a bidirectional encoder with BERT's two heads.

    Fields are those of :class:`TransformerConfig`, with BERT's own epsilon, and these.

    Attributes:
        model_type: name of this class among the fields of a checkpoint; always ``"bert"``.
        num_token_types: segments that a token can belong to; 0 for none.
        next_sentence: True if there are a pooler and the head that predicts whether the second segment follows the
            first.
        norm_position: ``"after"`` for norms of the embedding and of each sum of a sub-layer with its input, as
            published; ``"before"`` for norms of each sub-layer's input and of the last block's output, as in
            Megatron-LM's BERT.
        head_activation: activation of the head of masked tokens, where it is not that of the layers; ``""`` for the
            same.
    """

    norm_epsilon: float = 1e-12
    model_type: str = "bert"
    num_token_types: int = 2
    next_sentence: bool = True
    norm_position: str = "after"
    head_activation: str = ""

    is_causal: ClassVar[bool] = False
    _more_rules: ClassVar[Rules] = {
        "model_type": OneOf(("bert",)),
        "num_token_types": at_least(0),
        "norm_position": OneOf(NORM_POSITIONS),
        "head_activation": OneOf(("", "gelu", "gelu_tanh", "relu")),
    }

    def _shape_problems(self) -> list[Problem]:
        found = super()._shape_problems()
        for each in fields(TransformerConfig):
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            if each.name not in _TAKEN and getattr(self, each.name) != usual:
                found.append(Problem(each.name, getattr(self, each.name), "not what BERT computes", (usual,)))
        if self.activation in GATED:
            found.append(Problem("activation", self.activation, "BERT's layers have no gate", ("gelu",)))
        return found

    @property
    def norms_after(self) -> bool:
        """True if norms follow the sums."""
        return self.norm_position == "after"

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters of the model with its heads, vocabulary padding not counted."""
        h = self.hidden_size
        dense, norm = h * h + h, h if self.norm == "rmsnorm" else 2 * h
        # super() counts one final norm: here it stands for that of the embedding, or the encoder's last.
        found = super().num_parameters(active=active) + self.num_token_types * h + dense + norm + self.vocab_size
        return found + (dense + 2 * h + 2 if self.next_sentence else 0)

    def flops_per_token(self, seq_length: int) -> float:
        """Matmul FLOPs of forward and backward for one token, which attends to all others."""
        other_half = self.num_layers * self.num_attention_heads * self.head_dim * seq_length
        return super().flops_per_token(seq_length) + 6.0 * (other_half + self.hidden_size**2)

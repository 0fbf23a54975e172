"""Description of a call of attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightning_megatron.config.score_rule import PLAIN, ScoreRule
from lightning_megatron.documents import Documents


class AttentionCall(NamedTuple):
    """A call of attention, without its queries ``[S, B, N, D]``, keys ``[T, B, G, D]`` and values ``[T, B, G, V]``.

    It is a tuple, so that code that walks through arguments finds the tensors in it. Give its fields by name.

    Attributes:
        causal: True if position ``i`` sees only positions up to ``i``.
        dropout: probability of dropping an attention weight.
        first_query: position of the first query among the keys, at least 0 (decoding with a cache); the keys may all
            precede it.
        key_mask: ``[B, T]``, True for keys that are seen; ``None`` for all. If a query sees none, all weigh the same.
        rule: rule of the scores.
        sinks: ``[N]``, score of each head's attention sink, for a rule that has sinks.
        bias: ``[1 or B, N, S, T]``, added to the scores once they are scaled and capped; ``None`` for none.
        documents: documents of the whole sequences; attention stays inside each. ``None`` for whole sequences. Only
            :func:`lightning_megatron.ops.attention.document_attention` and context parallelism read them.
    """

    causal: bool
    dropout: float = 0.0
    first_query: int = 0
    key_mask: Tensor | None = None
    rule: ScoreRule = PLAIN
    sinks: Tensor | None = None
    bias: Tensor | None = None
    documents: Documents | None = None

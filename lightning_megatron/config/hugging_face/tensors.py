"""Tensors of a Hugging Face architecture by our names, as data; ``checkpoint/formats/hf/tensors.py`` interprets it.

Names are templates: ``{n}`` is the number of a layer, ``{e}`` that of an expert, ``{kind}`` is ``weight`` or ``bias``,
``{after}`` in foreign names is the number counted on from the last layer. In a model with two stacks, foreign numbers
count within a stack.
A family may list tensors that only some of its models have: a rule applies if the model has the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

SAME = "same"
"""Tensor that is the same on both sides."""
TRANSPOSED = "transposed"
"""Matrix, or one per expert, that the other side stores as ``[in, out]``."""
STACKED = "stacked"
"""Foreign tensors along a new first dimension; with ``{e}`` in the names ``[E, ...]``, or ``[E, parts, ...]``."""
QKV = "qkv"
"""Queries, keys and values, fused by query group; of three tensors, or of one that holds them one after the other."""
KV = "kv"
"""Keys and values of two tensors, fused by head."""
GROUPED = "grouped"
"""Rows fused by group, as the rule's ``groups`` says; of one tensor per part, or of one that holds them one after the
other."""
COLUMNS_OF_QKV = "columns of qkv"
"""One tensor of queries, keys and values, stored as ``[in, out]``."""
INTERLEAVED = "interleaved"
"""Gate and up of each expert, whose rows alternate in one tensor ``[E, 2 F, ...]``."""
INTERLEAVED_COLUMNS = "interleaved columns"
"""The same for matrices that are stored as ``[in, out]``, whose columns alternate."""
PAIRED_HEADS = "paired heads"
"""Heads whose last rows are rotated in adjacent pairs; ours rotate each feature with the one half a head further."""
PAIRED_END = "paired end"
"""The same for one head after other rows."""


class RowGroups(NamedTuple):
    """Rows of a fused matrix: groups of equal size, each with the rows of every part.

    Attributes:
        number: number of groups.
        widths: rows of each part in a group.
    """

    number: int
    widths: tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """One of our tensors, and the foreign tensors of which it is made.

    Attributes:
        native: template of our name.
        foreign: templates of the foreign names.
        kind: relation of the two, one of the constants above.
        tied: further foreign name of the tensor, where embeddings are tied.
        repeats: further foreign names under which files may hold it, in any model.
        otherwise: foreign name of the tensor to use if files lack this one.
        stack: stack of the layer; empty in a model that has one.
        gated: True for models whose feed-forward layers have gates, False for those without; ``None`` for all.
        copied: template of further foreign names, one for each module after the last layer.
        groups: function of a configuration that gives the groups of a ``GROUPED`` tensor.
    """

    native: str
    foreign: tuple[str, ...]
    kind: str = SAME
    tied: str | None = None
    repeats: tuple[str, ...] = ()
    otherwise: str | None = None
    stack: str = ""
    gated: bool | None = None
    copied: str | None = None
    groups: Callable[[Any], RowGroups] | None = None


@dataclass(frozen=True)
class Tensors:
    """All tensors of an architecture.

    Attributes:
        rules: rules in the order of files; adjacent rules with ``{n}`` are expanded layer by layer.
        prefix: beginning of foreign names; files of the model without its head leave it out.
        ignored: pattern of foreign names that hold no parameter (buffers of older versions).
        heads: beginning of the names of heads, which have no prefix.
    """

    rules: tuple[TensorRule, ...]
    prefix: str = "model."
    ignored: str = r"rotary_emb\.inv_freq$"
    heads: str = "lm_head."

    def plus(self, *rules: TensorRule) -> Tensors:
        """A copy with further rules."""
        return replace(self, rules=self.rules + rules)


def rule(
    native: str,
    *foreign: str,
    kind: str = SAME,
    tied: str | None = None,
    **more: Any,
) -> TensorRule:
    """One rule; further arguments are attributes of :class:`TensorRule`."""
    return TensorRule(native, foreign, kind, tied, **more)


def in_layers(native: str, foreign: str, *rules: TensorRule, stack: str = "") -> tuple[TensorRule, ...]:
    """Prefix both names of some rules for the layers of a stack; each prefix contains ``{n}``."""
    return tuple(
        replace(each, native=native + each.native, foreign=tuple(foreign + name for name in each.foreign), stack=stack)
        for each in rules
    )

"""The two parts of a transformer layer, as a block uses them.

A kind of layer is a subclass of :class:`Mixer` or :class:`FeedForward`. A model's configuration names the classes of
each layer (``config/layer_spec.py``), and a block builds them. Both are built from the configuration, the mesh, and
``layer``, ``sequence_parallel``, ``recompute`` and ``ops``; a mixer also gets ``causal``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

from torch import nn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem


class Cache(Protocol):
    """State of a mixer after the tokens decoded so far."""

    @property
    def length(self) -> int:
        """Number of tokens decoded so far."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory of the state."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens; the appended ones may end in padding."""
        ...


class LayerPart(nn.Module):
    """Base of both parts."""

    @classmethod
    def layout_problems(cls, config: TransformerConfig, layout: ParallelLayout) -> list[Problem]:
        """Faults of a layout for this kind of part, in addition to those of the model's sizes."""
        return []


class Mixer(LayerPart):
    """Mixes the tokens of a sequence: attention of any kind, or a recurrence.

    ``forward(x, rotary, cache, key_mask, documents=...)`` maps ``[S, B, H]``, or a sequence shard, to the same shape.

    Attributes:
        takes_documents: True if tokens of a document can be kept from seeing those of others in the same sequence.
    """

    takes_documents: ClassVar[bool] = True

    def is_pure(self, module: str) -> bool:
        """True if ``"core_attn"``, or the whole ``"attention"``, draws no random numbers and communicates nothing.

        Its recomputation needs no generators then.
        """
        return False

    def new_cache(self) -> Cache:
        """An empty cache for decoding."""
        raise NotImplementedError(f"{type(self).__name__} cannot decode")


class FeedForward(LayerPart):
    """Transforms each token.

    ``forward(x, routed)`` maps ``[S, B, H]``, or a sequence shard, to the same shape. It returns the result, or a pair
    of the result and an auxiliary loss (``None`` for none). ``routed`` is left out where all tokens are alike.

    Attributes:
        is_pure: True if it draws no random numbers, counts nothing and communicates nothing.
    """

    is_pure = False

    def run_context(self) -> AbstractContextManager[Any]:
        """Context of a forward that a backward may repeat; where the forward is compiled, its caller enters it."""
        return nullcontext()


def part_class(name: str) -> Any:
    """The class of a part.

    Args:
        name: ``module:name``.
    """
    return resolve_name(name)


def part_problems(config: TransformerConfig, layout: ParallelLayout) -> list[Problem]:
    """Faults of a layout for the parts of a model, each once."""
    kinds = dict.fromkeys(name for layer in config.layers for name in (layer.mixer, layer.feed_forward))
    return [problem for name in kinds for problem in part_class(name).layout_problems(config, layout)]

"""Families whose checkpoints of Megatron have other tensors around the layers than a decoder's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any, NamedTuple

from lightning_megatron.checkpoint.formats.megatron.legacy import MegatronCheckpoint
from lightning_megatron.checkpoint.formats.weight_map import WeightRule
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.families import FAMILIES, first_family


class MegatronFamily(NamedTuple):
    """One family in Megatron's checkpoints; :class:`~lightning_megatron.config.hugging_face.family.Family` names it.

    Attributes:
        marker: name of a tensor that only this family has, by the names of ``names.py``.
        config: function from fields of ``TransformerConfig`` and a checkpoint to the family's configuration.
        rules: function that returns rules for all tensors except those of layers and of the word embedding, for a
            configuration.
    """

    marker: str
    config: Callable[[Mapping[str, Any], MegatronCheckpoint], TransformerConfig]
    rules: Callable[[Any], list[WeightRule]]


def family_of_config(config: TransformerConfig) -> MegatronFamily | None:
    """The family of a configuration; ``None`` for a decoder."""
    name = first_family(config).megatron
    found: MegatronFamily | None = resolve_name(name) if name else None
    return found


def family_of_checkpoint(checkpoint: MegatronCheckpoint) -> MegatronFamily | None:
    """The family of a checkpoint; ``None`` for a decoder."""
    known: list[MegatronFamily] = [resolve_name(each.megatron) for each in FAMILIES.values() if each.megatron]
    return next((each for each in known if each.marker in checkpoint.tensors), None)

"""Presets: configurations by name, which the families define."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lightning_megatron.config.hugging_face.family import Recipe
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem, nearest_names, raise_if_any
from lightning_megatron.extensions import LazyMapping
from lightning_megatron.families import FAMILIES

_RECIPES: Mapping[str, Recipe] = LazyMapping(
    lambda: {name: recipe for family in FAMILIES.values() for name, recipe in family.presets.items()}
)


class _Presets(Mapping[str, TransformerConfig]):
    """Configurations by name; each is built and checked at its first use."""

    def __getitem__(self, name: str) -> TransformerConfig:
        return _built(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_RECIPES)

    def __len__(self) -> int:
        return len(_RECIPES)

    def __contains__(self, name: object) -> bool:  # the inherited one would build it
        return name in _RECIPES


@cache
def _built(name: str) -> TransformerConfig:
    return _RECIPES[name]()


PRESETS: Mapping[str, TransformerConfig] = _Presets()


def preset(name: str) -> TransformerConfig:
    """The configuration of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest ones.
    """
    if name not in PRESETS:
        raise_if_any([Problem("config", name, "unknown preset", nearest_names(name, list(PRESETS)))])
    return PRESETS[name]


def configuration(given: str | TransformerConfig | Mapping[str, Any], **changes: Any) -> TransformerConfig:
    """The configuration for a preset's name, a configuration, or a mapping of fields, with ``changes`` applied.

    Raises:
        ConfigError: for an unknown name or field, or sizes that cannot work.
    """
    if isinstance(given, str):
        given = preset(given)
    elif not isinstance(given, TransformerConfig):
        family = FAMILIES.get(str(given.get("model_type")))
        given = (family.config_class if family else TransformerConfig).of(given)
    return given.replace(**changes)

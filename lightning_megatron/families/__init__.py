"""The model families, one file each; torch is not needed.

Those of decoders are found by listing the folder, others by their names in ``extensions``. All are imported at the
first look for a family, not with this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import resolve_name, walk_packages
from typing import Any

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.extensions import LazyMapping, further_families


def _in_folder() -> Iterator[Family]:
    for each in walk_packages(__path__, f"{__name__}."):
        family: Family | None = getattr(import_module(each.name), "FAMILY", None)
        if family is not None:
            yield family


def _all() -> dict[str, Family]:
    found: dict[str, Family] = {}
    own = sorted(_in_folder(), key=lambda each: (not each.default_preset, each.model_type))
    for each in (*own, *further_families(Family)):
        if each.model_type in found:
            raise ConfigError([Problem("model_type", each.model_type, "two families are registered for it")])
        found[each.model_type] = each
    return found


FAMILIES: Mapping[str, Family] = LazyMapping(_all)
"""Families by the ``model_type`` of ``config.json``: every ``FAMILY`` of a file in this folder, and those elsewhere.

An export tries them in this order. Among those of the folder, families with the default preset of a module come first,
so that a LLaMA is written as one even if another family computes the same.
"""

DEFAULT_PRESETS: Mapping[str, str] = LazyMapping(
    lambda: {family.module_name: family.default_preset for family in FAMILIES.values() if family.default_preset}
)
"""Default preset of each LightningModule, by the module's name."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that the contents of a ``config.json`` belong to.

    Raises:
        ConfigError: for a ``model_type`` that no family has.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError([Problem("model_type", kind, "no mapping for it", nearest_names(kind, list(FAMILIES)))])
    return FAMILIES[kind]


def family_for(config: TransformerConfig, source: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family that one of our models is exported as, and the contents of its ``config.json``.

    Args:
        source: ``model_type`` of the directory that the model was imported from; its family is tried first.

    Raises:
        ConfigError: if none can compute it, with the reasons of the nearest.
    """
    refusals: list[ConfigError] = []
    able = [family for family in FAMILIES.values() if family.config_class is type(config)]
    for family in sorted(able, key=lambda each: each.model_type != source):
        try:
            return family, family.config_to_hf(config)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise min(refusals, key=lambda refusal: len(refusal.problems))


def first_family(config: TransformerConfig) -> Family:
    """The first family with a configuration's class, or the nearest class above it.

    Families that share a class of configurations share the model, too.
    """
    families = {family.config_class: family for family in reversed([*FAMILIES.values()])}
    return next(families[kind] for kind in type(config).__mro__ if kind in families)


def module_of(config: TransformerConfig) -> Any:
    """Class of the LightningModule for a configuration; any decoder is trained by the same."""
    return resolve_name(first_family(config).module)

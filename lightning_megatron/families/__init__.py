"""The model families, one file each, found by listing the folder; torch is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem, nearest_names


def _in_folder() -> Iterator[Family]:
    for each in walk_packages(__path__, f"{__name__}."):
        family: Family | None = getattr(import_module(each.name), "FAMILY", None)
        if family is not None:
            yield family


FAMILIES: Mapping[str, Family] = {
    each.model_type: each for each in sorted(_in_folder(), key=lambda each: (not each.default_preset, each.model_type))
}
"""Families by the ``model_type`` of ``config.json``: every ``FAMILY`` of a file in this folder.

An export tries them in this order. Families with the default preset of a module come first, so that a LLaMA is written
as one even if another family computes the same.
"""

DEFAULT_PRESETS: Mapping[str, str] = {
    family.module: family.default_preset for family in FAMILIES.values() if family.default_preset
}
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


def module_of(config: TransformerConfig) -> str:
    """Name of the LightningModule for a configuration; any decoder is trained by the same."""
    kind = type(config)
    return next((family.module for family in FAMILIES.values() if family.config_class is kind), "GPTModule")

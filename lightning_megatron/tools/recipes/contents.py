"""Contents of recipes as plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.files.small import read_yaml


def contents_of(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Contents of a recipe, or of several of which later ones change earlier ones.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    recipe: dict[str, Any] = {}
    for path in paths:
        recipe = merged(recipe, _read(path))
    return recipe


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with another one laid over it; arguments of another class replace those of the first."""
    found = dict(base)
    for name, value in over.items():
        before = found.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            other_class = "class_path" in value and _last(value["class_path"]) != _last(before.get("class_path", ""))
            found[name] = dict(value) if other_class else merged(before, value)
        else:
            found[name] = value
    return found


def class_of(part: object) -> str:
    """Name of the class that a part of a recipe names, without its module."""
    return _last(part.get("class_path", "") if isinstance(part, Mapping) else part)


def arguments_of(part: object) -> dict[str, Any]:
    """Arguments of the class that a part of a recipe names."""
    return mapping_of(part, "init_args")


def mapping_of(part: object, name: str) -> dict[str, Any]:
    """The mapping of that name in a part of a recipe; empty if there is none."""
    found = part.get(name) if isinstance(part, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _last(class_path: object) -> str:
    return str(class_path).rsplit(".", 1)[-1]


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    import yaml

    try:
        contents = read_yaml(Path(path).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = f"cannot be read: {' '.join(str(error).split())}"
        raise ConfigError([Problem("--config", str(path), reason)]) from None
    if not isinstance(contents, dict):
        raise ConfigError([Problem("--config", str(path), "is no recipe: it holds no mapping")])
    return contents

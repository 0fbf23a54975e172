"""Words for LightningCLI, which reads only files: recipe names become files, environment variables one more part.

Every process of a job reads the words of the first one, so the same words give the same files in each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.files.small import read_yaml
from lightning_megatron.tools.cli.recipes.scale import scaled_recipe
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.environment import VARIABLES, changes_of
from lightning_megatron.tools.recipes.names import recipe_files

_OPTIONS = ("--config", "-c", "--recipe", "--scale")


@dataclass
class _Given:
    """Recipes among the words of a command.

    Attributes:
        files: files of the recipe, in their order.
        names: names of its parts, for the folder of a small twin.
        scale: value of ``--scale``.
        others: all other words, with ``None`` in the place of the last file.
    """

    files: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scale: str | None = None
    others: list[str | None] = field(default_factory=list)


def config_words(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Replace recipe names by files; words without a recipe are returned unchanged.

    Args:
        words: words of a command, with ``--recipe NAME``, ``--config FILE`` and ``--scale cpu`` in any order.
        environment: variables that may give paths.

    Raises:
        ConfigError: for an unknown name, a file that cannot be read, or a job without a small twin.
    """
    given = _read(words)
    _refuse_multiplied(given.files, words)
    if not given.files:
        if given.scale is not None:
            raise ConfigError([Problem("--scale", given.scale, "needs a recipe: --recipe NAME or --config FILE")])
        return list(words)
    parts = given.files
    if given.scale is not None:
        parts = [str(scaled_recipe(given.files, "-".join(given.names), given.scale, environment))]
    elif any(environment.get(name) for name in VARIABLES):
        changes = changes_of(contents_of(given.files), environment)
        parts = [*given.files, *([json.dumps(changes)] if changes else [])]
    found: list[str] = []
    for word in given.others:
        found += [word] if word is not None else [each for part in parts for each in ("--config", part)]
    return found


def _refuse_multiplied(files: Sequence[str], words: Sequence[str]) -> None:
    """Refuse YAML files whose aliases multiply, before LightningCLI copies what they make; it reports other faults."""
    import yaml

    named = [word.partition("=")[2] or word for word in words]
    for file in dict.fromkeys([*files, *(name for name in named if name.endswith((".yaml", ".yml")))]):
        with suppress(OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
            text = Path(file).read_text()
            try:
                read_yaml(text if "&" in text else "")
            except ValueError as error:
                raise ConfigError([Problem("--config", file, f"cannot be read: {error}")]) from None


def _read(words: Sequence[str]) -> _Given:
    given, rest = _Given(), list(words)
    while rest:
        name, joined, value = rest[0].partition("=")
        if name not in _OPTIONS or (not joined and len(rest) == 1):
            given.others.append(rest.pop(0))
            continue
        rest.pop(0)
        value = value if joined else rest.pop(0)
        if name == "--scale":
            given.scale = value
            continue
        given.others = [word for word in given.others if word is not None] + [None]
        given.files += [str(path) for path in recipe_files(value)] if name == "--recipe" else [value]
        given.names.append(value if name == "--recipe" else Path(value).stem)
    return given

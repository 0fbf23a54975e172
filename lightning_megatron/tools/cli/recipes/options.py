"""Options of the commands that read a recipe, and its files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.tools.recipes.contents import contents_of, merged
from lightning_megatron.tools.recipes.environment import changes_of
from lightning_megatron.tools.recipes.names import is_file, recipe_files


def add_recipe(parser: argparse.ArgumentParser, config: str = "recipe; may be given several times") -> None:
    """Add ``--config FILE`` and ``--recipe NAME``, whose values come in their order in ``options.config``.

    Args:
        parser: parser of the command.
        config: words for the help of ``--config``.
    """
    parser.add_argument("--config", action="append", metavar="YAML", help=config)
    words = "a recipe of this package; `lightning-megatron recipes` lists them"
    parser.add_argument("--recipe", action=_Named, dest="config", metavar="NAME", help=words)


class _Named(argparse.Action):
    """An action that appends the files of a recipe."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Append the files of a name; an unknown one is a parser's error."""
        try:
            files = [str(path) for path in recipe_files(values)]
        except ConfigError as error:
            parser.error(str(error.problems[0]))
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), *files])


class NamedAsGiven(argparse.Action):
    """An action that appends names of recipes, and paths written so that none looks like a name."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Append the value of ``--recipe`` or ``--config``."""
        word = values if option == "--recipe" or is_file(values) else os.path.join(".", values)
        if option == "--recipe" and is_file(word):
            parser.error(f"--recipe {word}: is a file: give it to --config")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), word])


def required(options: argparse.Namespace) -> list[str]:
    """The files of the recipe.

    Raises:
        ConfigError: if none is given.
    """
    if not options.config:
        raise ConfigError([Problem("--config", None, "give a recipe: --config FILE or --recipe NAME")])
    return list(options.config)


def with_environment(paths: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Contents of a recipe, with the paths that environment variables override."""
    recipe = contents_of(paths)
    return merged(recipe, changes_of(recipe, environment))

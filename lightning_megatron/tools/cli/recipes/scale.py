"""``--scale cpu``: a recipe's layout with a model, data and a length that a CPU trains in minutes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.families import FAMILIES
from lightning_megatron.tools.cli.recipes.job import Given, read_recipe
from lightning_megatron.tools.parity.scaled import MOST, on_cpu
from lightning_megatron.tools.recipes.contents import class_of, contents_of
from lightning_megatron.tools.recipes.environment import OUTPUT


def scaled_recipe(files: Sequence[str], name: str, scale: str, environment: Mapping[str, str]) -> Path:
    """Write the small twin of a recipe and its data.

    Args:
        files: files of the recipe.
        scale: value of ``--scale``: ``"cpu"`` or ``"cpu=N"``.
        environment: variables, of which one may name the output folder.

    Returns:
        The twin's recipe, in the folder that its run writes to.

    Raises:
        ConfigError: for another ``scale``, or a recipe without a twin.
    """
    most = _most(scale)
    recipe = contents_of(files)
    kind = class_of(recipe.get("model"))
    if (twin := _own_twin(kind)) is not None:
        reason = f"is for decoders; the recipe {twin} is small, and its data are made by hand"
        raise ConfigError([Problem("--scale", scale, reason, (f"--recipe {twin}",))])
    output = environment.get(OUTPUT) or (recipe.get("trainer") or {}).get("default_root_dir") or "out"
    folder = Path(output) / f"{name}-on-cpu"
    _publish(on_cpu(recipe, read_recipe(files, Given()), folder, most), folder)
    return folder / "recipe.yaml"


def _own_twin(module: str) -> str | None:
    """The recipe for a CPU of a module that trains no decoder."""
    others = (each for each in FAMILIES.values() if each.config_class is not TransformerConfig)
    folders = [each.recipes for each in others if each.module_name == module and each.recipes]
    return next((path.stem for folder in folders for path in folder.glob("*-tiny.yaml")), None)


def _most(scale: str) -> int:
    word, joined, number = scale.partition("=")
    if word != "cpu" or (joined and not (number.isdigit() and int(number) > 0)):
        reason = f"must be cpu, or cpu=N for a layout of at most N processes (default {MOST})"
        raise ConfigError([Problem("--scale", scale, reason, ("cpu",))])
    return int(number) if joined else MOST


def _publish(recipe: Mapping[str, Any], folder: Path) -> None:
    """Write recipe and tokens; all processes of a job do so at once, with the same bytes."""
    import yaml

    from lightning_megatron.tools.parity.recipe import write_tokens

    text = f"# Made by --scale cpu: random tokens, a tiny model.\n{yaml.safe_dump(dict(recipe), sort_keys=False)}"
    file = folder / "recipe.yaml"
    if file.is_file() and file.read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        made = Path(name)
        write_tokens(made / "tokens")
        (made / "recipe.yaml").write_text(text)
        for each in ("tokens.bin", "tokens.idx", "recipe.yaml"):
            os.replace(made / each, folder / each)

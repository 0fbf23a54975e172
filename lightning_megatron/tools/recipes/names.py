"""Names of the recipes that come with the package.

A recipe is a file ``NAME.yaml`` beside this one, or in a family's folder; ``NAME/32k.yaml`` holds the differences of
``NAME-32k`` to it.
"""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.errors import ConfigError, Problem, nearest_names
from lightning_megatron.families import FAMILIES

_FOLDER = Path(__file__).parent
_ENDINGS = (".yaml", ".yml", ".json")


def recipe_names() -> list[str]:
    """All names, in alphabetical order."""
    return sorted(_all())


def recipe_files(name: str) -> tuple[Path, ...]:
    """Files of a recipe, of which later ones change earlier ones.

    Raises:
        ConfigError: for an unknown name.
    """
    known = _all()
    if name not in known:
        reason = "there is no recipe of this name; `lightning-megatron recipes` lists them, --config takes files"
        raise ConfigError([Problem("--recipe", name, reason, nearest_names(name, list(known))[:5])])
    return known[name]


def is_file(word: str) -> bool:
    """True for the path of a recipe of the user's, False for a name."""
    return "/" in word or word.endswith(_ENDINGS)


def files_of(word: str) -> tuple[Path, ...]:
    """Files of a recipe that is given by its name or its path."""
    return (Path(word),) if is_file(word) else recipe_files(word)


def _all() -> dict[str, tuple[Path, ...]]:
    found: dict[str, tuple[Path, ...]] = {}
    for folder in (_FOLDER, *(family.recipes for family in FAMILIES.values() if family.recipes)):
        found |= {path.stem: (path,) for path in folder.glob("*.yaml")}
        for path in folder.glob("*/*.yaml"):
            found[f"{path.parent.name}-{path.stem}"] = (folder / f"{path.parent.name}.yaml", path)
    return found

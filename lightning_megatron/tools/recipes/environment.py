"""Paths of a recipe from variables of the environment, which stand between the recipe and the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

from lightning_megatron.families import FAMILIES
from lightning_megatron.tools.recipes.contents import arguments_of, class_of

_PREFIX = "LIGHTNING_MEGATRON_"
OUTPUT = f"{_PREFIX}OUTPUT_DIR"
DATA: Mapping[str, str] = {
    f"{_PREFIX}DATA_PATH": "data_path",
    f"{_PREFIX}VAL_DATA_PATH": "val_data_path",
    f"{_PREFIX}TEST_DATA_PATH": "test_data_path",
    f"{_PREFIX}DATA_CACHE_DIR": "cache_dir",
    f"{_PREFIX}TOKENIZER_MODEL": "tokenizer_model",
    f"{_PREFIX}VOCAB_FILE": "vocab_file",
    f"{_PREFIX}MERGE_FILE": "merge_file",
}
"""Arguments of data modules by variable; a data module takes those that it has."""

VARIABLES = (*DATA, OUTPUT)


def changes_of(recipe: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Parts of a recipe that variables change; empty if none does. Empty variables count as missing."""
    found: dict[str, Any] = {}
    data = recipe.get("data")
    taken = _paths_of(class_of(data))
    given = {
        argument: _value(environment[name])
        for name, argument in DATA.items()
        if argument in taken and environment.get(name)
    }
    if given and isinstance(data, Mapping):
        found["data"] = {"class_path": data["class_path"], "init_args": given}
    if output := environment.get(OUTPUT):
        found["trainer"] = _moved(recipe.get("trainer") or {}, output)
    return found


def _paths_of(data_module: str) -> Collection[str]:
    """Arguments of a data module that are paths; none for one that no family names."""
    if data_module == "MegatronDataModule":
        return DATA.values()
    own = (family.data_paths.get(data_module) for family in FAMILIES.values())
    return next((paths for paths in own if paths), ())


def _value(text: str) -> Any:
    """A path, or with brackets a list of weights and paths."""
    if not text.startswith("["):
        return text
    import yaml

    return yaml.safe_load(text)


def _moved(trainer: Mapping[str, Any], output: str) -> dict[str, Any]:
    """Folders of the Trainer and its callbacks that lie in the recipe's own output folder, in another one."""
    found: dict[str, Any] = {"default_root_dir": output}
    before = trainer.get("default_root_dir")
    callbacks = trainer.get("callbacks")
    if before is None or not isinstance(callbacks, list):
        return found
    moved = []
    for callback in callbacks:
        folder = arguments_of(callback).get("dirpath")
        if folder is not None and PurePath(folder).is_relative_to(before):
            inside = PurePath(folder).relative_to(before)
            callback = {**callback, "init_args": arguments_of(callback) | {"dirpath": str(PurePath(output) / inside)}}
        moved.append(callback)
    return found if moved == callbacks else found | {"callbacks": moved}

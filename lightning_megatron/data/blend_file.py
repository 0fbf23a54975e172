"""Data paths from a YAML or JSON file: a blend, or one for each of training, validation and test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError, Problem, nearest_names, raise_if_any
from lightning_megatron.files.small import read_json, read_small, read_yaml

ENDINGS = (".yaml", ".yml", ".json")
KEYS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}

Given = Any
"""A data path of :func:`~lightning_megatron.data.build.build_gpt_datasets`, a mapping of them, or a file of either."""


def is_blend_file(path: object) -> bool:
    """True if a path names a blend file, and not a prefix of token files with the same ending."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    name = os.fspath(path)
    return name.endswith(ENDINGS) and not Path(f"{name}.idx").exists()


def read_blend(path: Given, argument: str) -> Given:
    """Content of a blend file, with prefixes resolved against its folder; anything else is returned unchanged.

    Args:
        path: data path.
        argument: name of the argument that gave it.

    Raises:
        ConfigError: if the file cannot be read, or holds something else.
    """
    if not is_blend_file(path):
        return path
    file = Path(path)
    content = _parsed(file, argument)
    if isinstance(content, Mapping):
        return {key: _placed(value, file, argument) for key, value in content.items()}
    return _placed(content, file, argument)


def by_split(path: Given, argument: str = "data_path") -> dict[str, Given] | None:
    """Data paths of ``train``, ``valid`` and ``test``, if a data path names splits; else ``None``.

    Args:
        path: data path, a mapping of them, or a file of either.
        argument: name of the argument that gave it.

    Raises:
        ConfigError: if it names other splits, or training alone.
    """
    content = read_blend(path, argument)
    if not isinstance(content, Mapping):
        return None
    unknown = [str(key) for key in content if key not in KEYS]
    problems = [
        Problem(argument, key, "is no split", nearest_names(key, ("train", "valid", "test"))) for key in unknown
    ]
    found = {KEYS[key]: value for key, value in content.items() if key in KEYS and value is not None}
    if not problems and ("train" not in found or len(found) == 1):
        reason = "needs train and one of valid and test; for data that all of them share, give a path without names"
        problems.append(Problem(argument, sorted(map(str, content)), reason))
    raise_if_any(problems)
    return found


def separated(data_path: Given, valid: Given | None, test: Given | None) -> tuple[Given, Given | None, Given | None]:
    """Data paths of training, validation and test.

    Args:
        data_path: data path of training or of all three, or one for each split.
        valid: ``val_data_path``.
        test: ``test_data_path``.

    Raises:
        ConfigError: if one is given twice.
    """
    named = by_split(data_path)
    if named is None:
        return data_path, valid, test
    given = {"val_data_path": valid, "test_data_path": test}
    reason = "data_path names the data of each split already"
    raise_if_any(Problem(name, path, reason, (None,)) for name, path in given.items() if path is not None)
    return named["train"], named.get("valid"), named.get("test")


def _parsed(file: Path, argument: str) -> Any:
    import yaml

    try:
        return read_json(file) if file.suffix == ".json" else read_yaml(read_small(file).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = f"the file cannot be read: {' '.join(str(error).split())}"
        raise ConfigError([Problem(argument, str(file), reason)]) from None


def _placed(value: Any, file: Path, argument: str) -> Given:
    items = [value] if isinstance(value, str) else value
    words = (str, int, float)
    if not isinstance(items, Sequence) or not items or not all(type(item) in words for item in items):
        reason = "holds no prefix, list of prefixes, list of weight, prefix, ..., nor these under train, valid, test"
        raise ConfigError([Problem(argument, str(file), reason)])
    return [item if is_number(item) else str(file.parent / item) for item in items]


def is_number(item: str | float) -> bool:
    """True for a weight of a blend, also as text; False for a prefix."""
    try:
        float(item)
    except ValueError:
        return False
    return True

"""Arguments that data modules share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_megatron.arguments import Check, Rules, at_least
from lightning_megatron.data.blend_file import by_split
from lightning_megatron.data.build import parse_data_path, parse_split
from lightning_megatron.errors import problems_of

ELSEWHERE = {
    "micro_batch_size": "it is an argument of the strategy",
    "train_data_path": "data_path, which is for training where val_data_path or test_data_path is given",
    "valid_data_path": "val_data_path",
    "data_args_path": "data_path, which takes such a file",
    "per_split_data_args_path": "data_path, which takes such a file",
    "data_cache_path": "cache_dir",
    "data_prefix": "data_path",
}
"""Arguments of these data modules, or advice, by the names that Megatron and NeMo use."""

COUNTS = ("train_samples", "val_samples", "test_samples")
"""Arguments with numbers of samples, in the order of the splits."""


def without_samples(part: int, paths: Mapping[str, Any], split: str, seq_length: int) -> str | None:
    """Text about a split that has no sample.

    Args:
        part: 0 for training, 1 for validation, 2 for tests.
        paths: data paths by argument.
        split: shares of ``data_path``, if that is the only one.
        seq_length: tokens of a sample.

    Returns:
        The text; ``None`` where nothing is asked for: no path, or a share of zero. Training is always asked for.
    """
    whole, argument = len(paths) != 1, ("data_path", "val_data_path", "test_data_path")[part]
    if part and (paths.get(argument) if whole else parse_split(split)[part]) is None:
        return None
    source = paths.get(argument) if whole else f"split={split!r} of {paths['data_path']}"
    return f"{source} has no sample of {seq_length} tokens for {COUNTS[part]}"


def readable_paths(argument: str) -> Check:
    """Rule for data paths that is checked before the files are opened."""

    def parse(path: Any) -> None:
        named = by_split(path, argument) if argument == "data_path" else None
        for each in [path] if named is None else named.values():
            parse_data_path(each, argument)

    return Check(lambda path: [] if path is None else problems_of(parse, path))


DATA_RULES: Rules = {
    "data_path": readable_paths("data_path"),
    "val_data_path": readable_paths("val_data_path"),
    "test_data_path": readable_paths("test_data_path"),
    "split": Check(partial(problems_of, parse_split)),
    "batch_size": at_least(1),
    "train_samples": at_least(0),
    "val_samples": at_least(0),
    "test_samples": at_least(0),
    "num_workers": at_least(0),
    "seed": at_least(0),
}
"""Bounds of the arguments that all data modules of ``.bin`` / ``.idx`` files have."""

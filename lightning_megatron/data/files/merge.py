"""Several pairs of token files as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.data.indexed import HEADER, IndexedDataset, index_path, tokens_path
from lightning_megatron.data.indexed_writer import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError, DataError, Problem, raise_if_any
from lightning_megatron.files.free_space import require_space


def pairs_of(inputs: Sequence[str | Path]) -> list[str]:
    """Prefixes that arguments name: prefixes themselves, and all pairs of folders in alphabetical order.

    Raises:
        DataError: if a folder has no pair.
    """
    found: list[str] = []
    for given in inputs:
        folder = Path(given)
        if not folder.is_dir():
            found.append(str(given))
            continue
        inside = sorted({str(path.with_suffix("")) for end in ("bin", "idx") for path in folder.glob(f"*.{end}")})
        if not inside:
            raise DataError.at(folder, "has no .bin and .idx", do="give prefixes, or a folder of token files")
        found += inside
    return found


def merge(inputs: Sequence[str | Path], output_prefix: str | Path, *, check_space: bool = True) -> IndexedDataset:
    """Write the documents of several pairs, in the order given, as one pair.

    The result is byte for byte what preprocessing the texts one after the other gives. It appears when it is complete,
    and memory does not grow with the input.

    Args:
        inputs: prefixes, or folders of pairs.
        output_prefix: prefix of the pair to write.
        check_space: refuse to begin if the disk is too full.

    Returns:
        The new pair.

    Raises:
        ConfigError: with all inputs that cannot be merged.
        DataError: if there is nothing to merge, or the disk is too full.
    """
    prefixes = pairs_of(inputs)
    opened, problems = [], []
    for prefix in prefixes:
        try:
            opened.append(IndexedDataset(prefix))
        except (DataError, OSError) as error:
            problems.append(Problem("input", prefix, str(error).removeprefix(f"{prefix}: ")))
    for other in opened[1:]:
        if other.dtype != opened[0].dtype:
            reason = f"its tokens are {other.dtype.name}, those of {opened[0].prefix} are {opened[0].dtype.name}: "
            problems.append(Problem("input", other.prefix, reason + "preprocess both with one tokenizer"))
    target = index_path(output_prefix).absolute()
    if any(index_path(prefix).absolute() == target for prefix in prefixes):
        problems.append(Problem("output_prefix", str(output_prefix), "is one of the inputs: give another name"))
    raise_if_any(problems)
    if not opened:
        raise ConfigError([Problem("input", list(map(str, inputs)), "names no token files")])
    if check_space:
        require_space(sum(_size(prefix) for prefix in prefixes), output_prefix)
    with IndexedDatasetWriter(output_prefix, opened[0].dtype) as writer:
        for dataset in opened:
            writer.add_index(dataset.prefix)
    return IndexedDataset(output_prefix)


def _size(prefix: str) -> int:
    return index_path(prefix).stat().st_size - HEADER.size + tokens_path(prefix).stat().st_size

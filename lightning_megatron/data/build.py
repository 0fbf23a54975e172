"""Training, validation and test data sets from paths and a split."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.blend import BlendedDataset, normalized
from lightning_megatron.data.blend_file import by_split, read_blend
from lightning_megatron.data.cache import default_cache_dir
from lightning_megatron.data.gpt_dataset import GPTDataset
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.errors import ConfigError, DataError, Problem, problems_of, raise_if_any

SPLITS = ("train", "valid", "test")

Span = tuple[float, float]
SampleDataset = GPTDataset | BlendedDataset
# Order matters: LightningCLI takes the first type that a value converts to, and a list converts to a text.
DataPath = Sequence[float | str | os.PathLike[str]] | str | os.PathLike[str]
DataPaths = Mapping[str, DataPath] | DataPath

_log = logging.getLogger(__name__)


def file_problems(data_path: DataPath, argument: str) -> list[Problem]:
    """Pairs of files that are missing or faulty.

    Args:
        data_path: data path, see :func:`build_gpt_datasets`; one that cannot be parsed is a fault, too.
        argument: name of the argument that gave it.
    """
    found = problems_of(parse_data_path, data_path, argument)
    for prefix in () if found else dict.fromkeys(parse_data_path(data_path, argument).prefixes):
        try:
            IndexedDataset(prefix)
        except (DataError, OSError) as error:
            found.append(Problem(argument, prefix, str(error).removeprefix(f"{prefix}: ")))
    return found


def share_problems(data_path: DataPath, split: str, wanted: Mapping[str, int | None]) -> list[Problem]:
    """Problems of splits that samples are wanted of, although no token falls into their share.

    Args:
        data_path: data path of valid files.
        split: shares of the sequences, see :func:`parse_split`.
        wanted: number of samples of training, validation and test, by argument.
    """
    blend, spans = parse_data_path(data_path), parse_split(split)
    found = [
        Problem(argument, samples, f"split={split!r} has no share for them", (0, None))
        for (argument, samples), span in zip(wanted.items(), spans, strict=True)
        if samples and span is None
    ]
    if len(blend.prefixes) > 1 and blend.weights is None:  # members without a sample are left out
        return found
    for prefix in dict.fromkeys(blend.prefixes):
        lengths = IndexedDataset(prefix).sequence_lengths
        for (argument, samples), span in zip(wanted.items(), spans, strict=True):
            begin, end = (round(bound * float(len(lengths))) for bound in span or (0.0, 0.0))
            if samples and span is not None and not lengths[begin:end].any():
                reason = f"no token of {prefix} is in its share of split={split!r}: make that larger"
                found.append(Problem(argument, samples, reason, (0, None)))
    return found


@dataclass(frozen=True)
class Blend:
    """Parsed data path: prefixes of the pairs, and a weight for each or none at all."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_split(split: str) -> tuple[Span | None, Span | None, Span | None]:
    """Parse the parts of the sequences that each split reads.

    Args:
        split: up to three numbers, ``"969,30,1"``: shares of training, validation and test data.

    Returns:
        For each split its (begin, end) between 0 and 1, or ``None`` if its share is zero.

    Raises:
        ConfigError: if these are not such numbers.
    """
    parts = [part for part in re.split(r"[,;:/\s]+", split) if part]
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or any(not 0 <= s < math.inf for s in shares) or not sum(shares) > 0:
        reason = "must be one to three numbers, none negative and not all zero: training, validation, test"
        raise ConfigError([Problem("split", split, reason, ("969,30,1", "98,2,0", "1,0,0"))])
    bounds = list(accumulate(normalized([*shares, 0.0, 0.0][:3]), initial=0.0))
    spans = [(a, b) if b > a else None for a, b in pairwise(bounds)]
    return spans[0], spans[1], spans[2]


def parse_data_path(data_path: DataPath, argument: str = "data_path") -> Blend:
    """Parse a prefix, a list of prefixes, ``[weight, prefix, weight, prefix, ...]``, or a file of one of them.

    Raises:
        ConfigError: if the list is neither, or a weight is not positive.
    """
    data_path = read_blend(data_path, argument)
    if isinstance(data_path, Mapping):
        raise ConfigError([Problem(argument, dict(data_path), "names splits, which is for data_path alone")])
    if isinstance(data_path, (str, os.PathLike)):
        return Blend((os.fspath(data_path),), None)
    items = list(data_path)
    weights = _weights_in(items)
    if not (all(weight > 0 for weight in weights) and sum(weights) < math.inf):
        reason = "every weight must be a positive number, and so their sum: leave out what is not to be read"
        raise ConfigError([Problem(argument, items, reason)])
    rest = items[1::2] if weights else items
    if not items or any(isinstance(item, (int, float)) for item in rest):
        reason = "is a prefix, a list of prefixes, or a list of weight, prefix, weight, prefix, ..."
        raise ConfigError([Problem(argument, items, reason)])
    prefixes = tuple(os.fspath(item) for item in rest if not isinstance(item, (int, float)))
    return Blend(prefixes, tuple(weights) or None)


def _weights_in(items: Sequence[Any]) -> list[float]:
    """The weights in a list of weight, prefix, weight, prefix, ...; none in one of prefixes alone."""
    try:
        weights = [float(item) for item in items[::2]]
    except (TypeError, ValueError):
        return []
    return weights if len(items) % 2 == 0 else []


def build_gpt_datasets(
    data_path: DataPaths | None = None,
    *,
    seq_length: int,
    num_samples: Sequence[int | None] = (None, None, None),
    split: str = "969,30,1",
    seed: int = 1234,
    cache_dir: str | Path | None = None,
    train_data_path: DataPath | None = None,
    valid_data_path: DataPath | None = None,
    test_data_path: DataPath | None = None,
    drop_last_partial_validation_sequence: bool = True,
    surplus: float = 0.005,
    **sample_options: Any,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """Build the training, validation and test data sets.

    No process group is used. Call this on one process of each node first, then on the others: they find the index
    arrays in the cache. Calling it on all at once is safe, but builds the arrays several times.

    Args:
        data_path: prefix of a ``.bin`` / ``.idx`` pair, a list of them (each read once, mixed by length), or
            ``[weight, prefix, ...]``. Cut into the three by ``split``. Also a YAML or JSON file of these, or a mapping
            (or a file of one) with a data path under each of ``train``, ``valid`` and ``test``.
        seq_length: tokens of a sample.
        num_samples: least number of samples for training, validation and test; ``None`` means one epoch (of a weighted
            blend: until its first member is used up), ``0`` means no such data set.
        split: shares of the sequences, see :func:`parse_split`.
        seed: seed of all orders.
        cache_dir: directory of the index arrays, for data in read-only folders; default
            ``cache/GPTDataset_indices`` beside the (first) pair.
        train_data_path: data path of training, read whole; then ``data_path`` and ``split`` are not used.
        valid_data_path: data path of validation, read whole.
        test_data_path: data path of testing, read whole.
        drop_last_partial_validation_sequence: ``False`` keeps the end of the validation data, padded to a sample.
        surplus: fraction of additional samples that are prepared for each member of a weighted blend.
        **sample_options: arguments of :class:`~lightning_megatron.data.gpt_dataset.GPTDataset`: ``pad_id``, ``eod_id``,
            ``eod_mask_loss``, ``reset_position_ids``, ``reset_attention_mask``, ``add_extra_token``.

    Returns:
        Training, validation and test data set; ``None`` if the number of samples is zero, without a path, and where the
        data or their share have not the tokens of a sample.

    Raises:
        ConfigError: if the arguments cannot work together.
        DataError: if a file is faulty, or has no tokens for a split that wants samples.
    """

    def make(dataset: IndexedDataset, span: Span, samples: int | None, options: Mapping[str, Any]) -> Any:
        sequences = np.arange(*(round(bound * float(len(dataset))) for bound in span), dtype=np.int32)
        if samples is None and not dataset.sequence_lengths[sequences].any():
            return None
        partial_end = options["split_name"] != "valid" or drop_last_partial_validation_sequence
        options = {**options, **sample_options, "drop_last_partial": partial_end}
        return GPTDataset(dataset, sequences, seq_length=seq_length, num_samples=samples, **options)

    own = {"train": train_data_path, "valid": valid_data_path, "test": test_data_path}
    named = by_split(data_path)
    if named is not None and not any(path is not None for path in own.values()):
        data_path, own = None, named
    paths = Paths(data_path, **own, split=split)  # type: ignore[arg-type]  # a mapping beside others is an error there
    wrong = [Problem("seq_length", seq_length, "a sample has at least 1 token", (1,))] if seq_length < 1 else []
    return build_datasets(make, paths, num_samples, wrong, seed=seed, cache_dir=cache_dir, surplus=surplus)


@dataclass(frozen=True)
class Paths:
    """Data paths of training, validation and test.

    Attributes:
        shared: data path that is cut into the three by ``split``; ``None`` where each has its own.
        train: data path of training, read whole.
        valid: data path of validation, read whole.
        test: data path of testing, read whole.
        split: shares of the shared data, see :func:`parse_split`.
    """

    shared: DataPath | None = None
    train: DataPath | None = None
    valid: DataPath | None = None
    test: DataPath | None = None
    split: str = "969,30,1"


MakeDataset = Callable[[IndexedDataset, Span, int | None, Mapping[str, Any]], Any]
"""Factory of a data set from the files of one pair, the share of them that a split reads, a number of samples, and
further options (``seed``, ``split_name``, ``cache_dir``); ``None`` if the share is empty and no number is given."""


def build_datasets(
    make: MakeDataset,
    paths: Paths,
    num_samples: Sequence[int | None],
    problems: Sequence[Problem] = (),
    *,
    seed: int,
    cache_dir: str | Path | None = None,
    surplus: float = 0.005,
) -> tuple[Any, Any, Any]:
    """Build the training, validation and test data sets of any kind of sample.

    Args:
        make: factory of the data sets.
        paths: data paths.
        num_samples: least number of samples, as of :func:`build_gpt_datasets`.
        problems: faults of the caller's other arguments, which are raised together with those found here.
        seed: seed of all orders.
        cache_dir: directory of the index arrays.
        surplus: fraction of additional samples that are prepared for each member of a weighted blend.
    """
    data_path, own, split = paths.shared, (paths.train, paths.valid, paths.test), paths.split
    raise_if_any([*problems, *_problems(data_path, own, num_samples, surplus)])
    spans: tuple[Span | None, ...]
    if data_path is not None:
        shared = parse_data_path(data_path)
        blends: list[Blend | None] = [shared] * 3
        spans = parse_split(split)
    else:
        blends = [None if p is None else parse_data_path(p, f"{s}_data_path") for p, s in zip(own, SPLITS, strict=True)]
        spans = ((0.0, 1.0),) * 3
        # As in Megatron: a single prefix is read as it is, whatever its weight.
        blends = [b if b is None or len(b.prefixes) > 1 else Blend(b.prefixes, None) for b in blends]

    opened = cache(IndexedDataset)
    result: list[Any] = []
    for name, blend, span, wanted in zip(SPLITS, blends, spans, num_samples, strict=True):
        if blend is None or span is None or wanted == 0:
            result.append(None)
            continue
        options = {"seed": seed, "split_name": name, "cache_dir": cache_dir}
        result.append(_build_split(make, blend, span, wanted, surplus, opened, options))
    return result[0], result[1], result[2]


def _build_split(
    make: MakeDataset,
    blend: Blend,
    span: Span,
    wanted: int | None,
    surplus: float,
    opened: Callable[[str], IndexedDataset],
    options: Mapping[str, Any],
) -> Any:
    def member(prefix: str, samples: int | None) -> Any:
        found = make(opened(prefix), span, samples, options)
        if found is None:
            level = logging.INFO if len(blend.prefixes) == 1 else logging.WARNING  # for one, the data module reports it
            _log.log(level, "%s: no tokens fall into its %s part", prefix, options["split_name"])
        return found

    prefixes = blend.prefixes
    if len(prefixes) == 1 and blend.weights is None:
        alone = member(prefixes[0], wanted)
        return alone if alone is not None and len(alone) else None
    cache_dir = options["cache_dir"] or default_cache_dir(prefixes[0])
    blended = partial(BlendedDataset, split_name=options["split_name"], cache_dir=cache_dir)
    if blend.weights is None or wanted is None:
        return _one_epoch_each(blend, wanted, member, blended)
    weights = normalized(blend.weights)
    targets = [math.ceil(wanted * w) for w in weights]
    built = [member(p, math.ceil(t * (1 + surplus))) for p, t in zip(prefixes, targets, strict=True)]
    # As long as Megatron's, whose length is the sum of the members' shares, each rounded up. With many members that is
    # far more than was asked for, and takes more samples of a large member than were prepared.
    members, size = [d for d in built if d is not None], sum(targets)
    return blended(members, weights, size, least=wanted, names=prefixes)


def _one_epoch_each(
    blend: Blend, wanted: int | None, member: Callable[[str, None], Any], blended: Callable[..., BlendedDataset]
) -> BlendedDataset | None:
    """A blend of one epoch of each member. Members without a sample for this split are left out."""
    found = {i: d for i, p in enumerate(blend.prefixes) if (d := member(p, None)) is not None and len(d)}
    if not found:
        return None
    weights: list[float] | None = None
    size = wanted
    if blend.weights is not None:  # the most samples that read none twice
        all_weights = normalized(blend.weights)
        weights = normalized([all_weights[i] for i in found])
        size = int(min(len(d) / weight for d, weight in zip(found.values(), weights, strict=True)))
    elif wanted is not None:
        size = min(wanted, sum(len(d) for d in found.values()))
    return blended(list(found.values()), weights, size, names=[blend.prefixes[i] for i in found])


def _problems(
    data_path: DataPath | None,
    own: Sequence[DataPath | None],
    num_samples: Sequence[int | None],
    surplus: float,
) -> list[Problem]:
    problems = []
    given = [f"{s}_data_path" for s, p in zip(SPLITS, own, strict=True) if p is not None]
    if (data_path is None) == (not given):
        reason = f"give either one data_path for all splits or one a split, not {'both' if given else 'none'}"
        problems.append(Problem("data_path", data_path, reason))
    if len(num_samples) != 3:
        problems.append(Problem("num_samples", tuple(num_samples), "takes three numbers: training, validation, test"))
    if any(n is not None and n < 0 for n in num_samples):
        problems.append(Problem("num_samples", tuple(num_samples), "a number of samples cannot be negative"))
    if surplus < 0:
        problems.append(Problem("surplus", surplus, "cannot be negative", (0.005,)))
    return problems

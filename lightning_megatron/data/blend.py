"""Several data sets read as one, in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.cache import cached_arrays, mapped_files, picklable, unpickled
from lightning_megatron.errors import DataError, Problem, raise_if_any

_NAMES = ("dataset_index", "dataset_sample_index")
_MOST_DATASETS = np.iinfo(np.int16).max
_FEW = 24
"""Up to this many data sets, Python's floats are faster than a NumPy call per sample."""


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in float64."""
    array = np.array(weights, np.float64)
    result: list[float] = (array / array.sum()).tolist()
    return result


def weighted_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Data set and sample number behind each sample of a blend.

    Each step takes the data set that is furthest behind its share of the samples so far: the first with the largest
    ``weight * max(k, 1) - drawn``, in float64. This is Megatron-LM's order, bit for bit.

    Args:
        weights: ``[n]`` shares, sum 1.
        size: number of samples.

    Returns:
        (data set numbers int16 ``[size]``, sample numbers int64 ``[size]``).
    """
    return _order(weights, size, [size] * len(weights))


def exhaustive_order(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Order as of :func:`weighted_order`, with every sample of every data set exactly once.

    Args:
        sizes: ``[n]`` samples of each data set; also their weights.
    """
    total = sum(sizes)
    return _order([size / total for size in sizes] if total else [], total, sizes)


def _order(weights: Sequence[float], size: int, limits: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    chosen = np.empty(size, np.int16)
    choose = _order_of_few if len(weights) <= _FEW else _order_of_many
    choose([float(w) for w in weights], limits, chosen)
    return chosen, _rank_within(chosen, len(weights))


def _order_of_few(weights: list[float], limits: Sequence[int], chosen: NDArray[np.int16]) -> None:
    drawn = [0.0] * len(weights)
    open_ones = [i for i, limit in enumerate(limits) if limit > 0]
    exhausted = float("-inf")
    for k in range(len(chosen)):
        m = float(k or 1)
        largest = exhausted
        best = -1
        for i in open_ones:
            behind = weights[i] * m - drawn[i]
            if behind > largest:
                largest, best = behind, i
        chosen[k] = best
        drawn[best] += 1.0
        if drawn[best] == limits[best]:
            open_ones.remove(best)


def _order_of_many(weights: list[float], limits: Sequence[int], chosen: NDArray[np.int16]) -> None:
    share = np.array(weights)
    drawn = np.where(np.array(limits) > 0, 0.0, np.inf)  # inf: never furthest behind
    behind = np.empty_like(share)
    for k in range(len(chosen)):
        np.multiply(share, float(k or 1), out=behind)
        np.subtract(behind, drawn, out=behind)
        best = int(behind.argmax())
        chosen[k] = best
        drawn[best] += 1.0
        if drawn[best] == limits[best]:
            drawn[best] = np.inf


def _rank_within(chosen: NDArray[np.int16], count: int) -> NDArray[np.int64]:
    """Number of earlier occurrences of each value, ``[size]``."""
    ranks = np.empty(len(chosen), np.int64)
    for i in range(count):
        mine = np.flatnonzero(chosen == i)
        ranks[mine] = np.arange(len(mine))
    return ranks


class BlendedDataset(Dataset[dict[str, Tensor]]):
    """Samples of several data sets, mixed by weight.

    Args:
        datasets: data sets to mix.
        weights: one positive number each; they need not sum to 1. ``None`` means their lengths.
        size: samples of the blend. ``None`` means every sample of every data set once, and takes no weights.
        least: samples after which the blend may end early where a data set runs out; ``None``: ``size``.
        split_name: name of the split in the cache and in messages.
        names: names of the data sets in messages; their ``prefix`` is a good name.
        cache_dir: directory of the stored order; ``None`` means that each process computes it.

    Raises:
        ConfigError: if the arguments cannot work.
        DataError: if a data set has fewer samples than its share.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[dict[str, Tensor]]],
        weights: Sequence[float] | None = None,
        size: int | None = None,
        *,
        least: int | None = None,
        split_name: str = "train",
        names: Sequence[str] | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.datasets = list(datasets)
        sizes = [len(d) for d in self.datasets]  # type: ignore[arg-type]  # torch leaves __len__ to the subclass
        raise_if_any(_problems(sizes, weights, size))
        names = [f"data set {i}" for i in range(len(sizes))] if names is None else list(names)

        def build() -> dict[str, NDArray[Any]]:
            if size is None:
                chosen, sample = exhaustive_order(sizes)
            else:
                chosen, sample = weighted_order(normalized(sizes if weights is None else weights), size)
            missing = np.flatnonzero(sample >= np.array(sizes)[chosen])
            if len(missing) and missing[0] < (len(chosen) if least is None else least):
                number = chosen[missing[0]]
                need, have = np.count_nonzero(chosen == number), sizes[number]
                fault = f"the {split_name} blend takes {need} samples, it has {have}"
                raise DataError.at(names[number], fault, do="lower its weight or the number of samples")
            end = missing[0] if len(missing) else len(chosen)
            return dict(zip(_NAMES, (chosen[:end], sample[:end]), strict=True))

        if cache_dir is None:
            built = build()
        else:
            description = {
                "class": "BlendedDataset",
                "split": split_name,
                "sizes": sizes,
                "weights": None if weights is None else [float(w) for w in weights],
                "size": size,
            }
            kind = f"BlendedDataset-{split_name}"
            built = cached_arrays(cache_dir, Path(cache_dir), kind, _NAMES, description, build)
        self._chosen, self._sample = (built[name] for name in _NAMES)
        self._mapped = mapped_files((self._chosen, self._sample))

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        number, sample = self.locate(item)
        return self.datasets[number][sample]

    def locate(self, item: int) -> tuple[int, int]:
        """Numbers of the data set and of its sample behind sample ``item``.

        Raises:
            DataError: if the index cache has been truncated during the run.
        """
        self._mapped.check()
        return int(self._chosen[item]), int(self._sample[item])

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_chosen": picklable(self._chosen), "_sample": picklable(self._sample)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.update(_chosen=unpickled(state["_chosen"]), _sample=unpickled(state["_sample"]))
        self.__dict__.update(state)


def _problems(sizes: Sequence[int], weights: Sequence[float] | None, size: int | None) -> list[Problem]:
    problems = []
    if not 0 < len(sizes) <= _MOST_DATASETS:
        problems.append(Problem("datasets", len(sizes), f"a blend has 1 to {_MOST_DATASETS} data sets"))
    if weights is not None:
        if len(weights) != len(sizes):
            problems.append(Problem("weights", list(weights), f"{len(sizes)} data sets need {len(sizes)} weights"))
        if any(not w > 0 or w == float("inf") for w in weights):
            problems.append(Problem("weights", list(weights), "every weight must be a positive number"))
        if size is None:
            problems.append(Problem("size", None, "weights need a number of samples to share out"))
    if size is not None and size < 0:
        problems.append(Problem("size", size, "cannot be negative", (0,)))
    return problems

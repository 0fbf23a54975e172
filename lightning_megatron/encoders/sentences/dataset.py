"""Base class of data sets whose samples are whole sentences of one document."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_megatron.data.cache import cached_arrays, default_cache_dir, mapped_files, picklable, unpickled
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.encoders.sentences.index import SentenceRule, build_sentence_index
from lightning_megatron.errors import DataError

IGNORED = -100
"""Label of a token that has no loss."""


class SentenceDataset(Dataset[dict[str, Tensor]]):
    """Samples of some sentences each, which depend on their number and the seed alone.

    Attributes:
        label_keys: keys whose values are ignored in a padding sample.

    Args:
        dataset: token files, made with ``preprocess --split-sentences``.
        documents: numbers of the documents to read, ``[n]``; ``None`` means all.
        rule: rule by which documents become samples.
        num_samples: number of samples, documents are repeated as needed; ``None`` means one epoch.
        seed: seed of the samples and their order.
        split_name: ``train``, ``valid`` or ``test``, used in the cache and in messages.
        cache_dir: directory of the index arrays; ``None`` means ``cache/GPTDataset_indices`` beside the files, or
            memory if that cannot be written.

    Raises:
        DataError: if no document has enough sentences, or ``cache_dir`` cannot be written.
    """

    label_keys: tuple[str, ...] = ("labels",)

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: NDArray[Any] | None,
        rule: SentenceRule,
        *,
        num_samples: int | None,
        seed: int,
        split_name: str,
        cache_dir: str | Path | None,
    ) -> None:
        self.dataset, self.split_name, self.seed = dataset, split_name, seed
        everything = np.arange(len(dataset.document_indices) - 1)
        chosen = everything if documents is None else np.asarray(documents, np.int64)
        self._samples = self._cached_index(chosen, rule, num_samples, cache_dir)
        self._mapped = mapped_files((self._samples,))
        if not len(self._samples) and num_samples != 0:
            least = rule.fewest_sentences
            fault = f"the {split_name} part has no document of {least} sentences or more ({len(chosen)} documents)"
            do = "make the files with preprocess --split-sentences, or give it a larger share of the split"
            raise DataError.at(dataset.prefix, fault, do=do)

    @property
    def index(self) -> NDArray[np.int64]:
        """First sentence, end and intended length of each sample, ``[n, 3]``."""
        return self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_samples": picklable(self._samples)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _samples=unpickled(state["_samples"]))

    def __getitem__(self, item: int | None) -> dict[str, Tensor]:
        """Sample ``item``, or for ``None`` padding: a real sample whose labels are ignored.

        Raises:
            IndexError: if there is no such sample.
            DataError: if the files have been changed during the run.
        """
        if item is not None and not -len(self) <= item < len(self):
            raise IndexError(f"{self.dataset.prefix}: {len(self)} {self.split_name} samples, there is no number {item}")
        sample = self.sample(0 if item is None else item % len(self))
        for name in self.label_keys if item is None else ():
            sample[name].fill_(IGNORED)
        return sample

    def sample(self, number: int) -> dict[str, Tensor]:
        """The sample with this number."""
        raise NotImplementedError

    def sentences(self, number: int) -> tuple[list[NDArray[np.int64]], int, RandomState]:
        """Sentences of a sample, its intended length, and its random stream.

        Args:
            number: number of the sample, at least 0.
        """
        self._mapped.check()
        first, end, target = self._samples[number].tolist()
        rng = RandomState((self.seed + number) % (1 << 32))
        return [self.dataset.get(i).astype(np.int64) for i in range(first, end)], target, rng

    def _cached_index(
        self, documents: NDArray[np.int64], rule: SentenceRule, num_samples: int | None, cache_dir: str | Path | None
    ) -> NDArray[np.int64]:
        lengths, bounds = self.dataset.sequence_lengths, self.dataset.document_indices
        description = {
            "class": type(self).__name__,
            "split": self.split_name,
            "documents_crc32": zlib.crc32(documents.tobytes()),
            "lengths_crc32": zlib.crc32(np.ascontiguousarray(lengths).tobytes()),
            "bounds_crc32": zlib.crc32(np.ascontiguousarray(bounds).tobytes()),
            "longest": rule.longest,
            "short_probability": rule.short_probability,
            "fewest_sentences": rule.fewest_sentences,
            "samples": num_samples,
            "seed": self.seed,
            "order": "mt19937",
        }

        def build() -> dict[str, NDArray[Any]]:
            found = build_sentence_index(lengths, bounds, documents, rule, num_samples=num_samples, seed=self.seed)
            return {"sample_index": found}

        kind, directory = f"{type(self).__name__}-{self.split_name}", default_cache_dir(self.dataset.prefix)
        return cached_arrays(cache_dir, directory, kind, ("sample_index",), description, build)["sample_index"]

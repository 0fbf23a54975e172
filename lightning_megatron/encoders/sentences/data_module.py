"""Base class of data modules whose samples are whole sentences of one document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.arguments import Rules, at_least, within
from lightning_megatron.data.build import Paths, SampleDataset, Span, build_datasets, parse_data_path, parse_split
from lightning_megatron.data.indexed import IndexedDataset
from lightning_megatron.encoders.sentences.index import documents_in_share, usable_documents
from lightning_megatron.encoders.sentences.masking import MaskingRule
from lightning_megatron.errors import Problem
from lightning_megatron.lightning.datamodules.arguments import COUNTS, DATA_RULES, ELSEWHERE
from lightning_megatron.lightning.datamodules.datamodule import MegatronDataModule

SENTENCE_NAMES: dict[str, str] = {
    **ELSEWHERE,
    "global_batch_size": "it is batch_size x dp x accumulate_grad_batches (of the Trainer)",
    "masked_lm_prob": "masking_probability",
    "short_seq_prob": "short_probability",
}
"""Arguments of these data modules, or advice, by the names that Megatron and NeMo use."""

SENTENCE_RULES: Rules = {
    **DATA_RULES,
    "masking_probability": within(0.0, 1.0),
    "max_ngram": at_least(1),
    "short_probability": within(0.0, 1.0),
}
"""Bounds of the arguments that all of these data modules have."""


class SentenceDataModule(MegatronDataModule):
    """Samples from Megatron's ``.bin`` / ``.idx`` files of sentences, split by documents.

    Attributes:
        fewest_sentences: least number of sentences in a sample.
    """

    fewest_sentences = 1

    masking: MaskingRule
    short_probability: float
    _dataset_class: type[Any]  # a SentenceDataset; each has arguments of its own

    def _own_arguments(self) -> dict[str, Any]:
        """Arguments of the data set that differ between these modules."""
        raise NotImplementedError

    def _share_problems(self) -> list[Problem]:
        blend, found = parse_data_path(self.data_path), []
        if len(blend.prefixes) > 1 and blend.weights is None:  # a member without a sample is left out
            return []
        count = "two sentences" if self.fewest_sentences == 2 else "one sentence"
        for argument, samples, span in zip(COUNTS, self._samples, parse_split(self.split), strict=True):
            for prefix in blend.prefixes if samples and span is not None else ():
                dataset = IndexedDataset(prefix)
                if not self._is_usable(dataset, documents_in_share(dataset, span or (0.0, 0.0))):
                    reason = f"no document of {count} of {prefix} is in its share of split={self.split!r}"
                    found.append(Problem(argument, samples, reason, (0, None)))
        return found

    def _is_usable(self, dataset: IndexedDataset, documents: NDArray[np.int64]) -> bool:
        """True if any of the documents is long enough for a sample."""
        bounds = dataset.document_indices
        return len(usable_documents(dataset.sequence_lengths, bounds, documents, self.fewest_sentences)) > 0

    def _make_datasets(self, paths: Paths, samples: tuple[int | None, ...]) -> tuple[SampleDataset | None, ...]:
        def make(dataset: IndexedDataset, span: Span, samples: int | None, options: Mapping[str, Any]) -> Any:
            chosen = documents_in_share(dataset, span)
            if samples is None and not self._is_usable(dataset, chosen):
                return None
            return self._dataset_class(dataset, chosen, num_samples=samples, **own, **options)

        own = self._own_arguments()
        own |= {"seq_length": self.seq_length, "masking": self.masking, "short_probability": self.short_probability}
        return build_datasets(make, paths, samples, seed=self.seed, cache_dir=self.cache_dir)

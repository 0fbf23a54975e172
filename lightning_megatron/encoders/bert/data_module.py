"""Samples for BERT in a LightningDataModule."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.arguments import OneOf, at_least, checked
from lightning_megatron.data.build import DataPath, DataPaths
from lightning_megatron.data.tokenizers import BertWordPieceTokenizer
from lightning_megatron.encoders.bert.dataset import BertDataset
from lightning_megatron.encoders.sentences.data_module import SENTENCE_NAMES, SENTENCE_RULES, SentenceDataModule
from lightning_megatron.encoders.sentences.masking import MaskingRule, Vocabulary
from lightning_megatron.errors import Problem, problems_of

WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")


class BertDataModule(SentenceDataModule):
    """Pairs of segments with masked tokens, from Megatron's ``.bin`` / ``.idx`` files of sentences.

    The files are made with ``preprocess --split-sentences``. As with :class:`MegatronDataModule`, ranks of one replica
    read the same samples, in an order that depends on no layout, and a checkpoint in mid-epoch resumes at the next one.

    Args:
        data_path: prefix of a pair of files, a list of prefixes, or ``[weight, prefix, ...]``; only for training if
            ``val_data_path`` or ``test_data_path`` is given. Or a file of these, or one under each of ``train``,
            ``valid`` and ``test``.
        seq_length: tokens of a sample, special tokens and padding counted.
        vocab_file: BERT's ``vocab.txt`` with which the files were made.
        tokenizer_type: ``"BertWordPieceLowerCase"`` or ``"BertWordPieceCase"``.
        batch_size: samples of one batch of one data-parallel replica.
        split: shares of the documents for training, validation and test, if ``data_path`` is for all three.
        train_samples: samples to draw for training, over as many epochs of the data as needed; ``None`` means as many
            as ``Trainer(max_steps=...)`` consumes, or one epoch of the data without it.
        val_samples: samples to draw for validation; ``None`` means one epoch of its share.
        test_samples: samples to draw for test; ``None`` as for ``val_samples``.
        seed: seed of samples and their order.
        num_workers: number of processes that load samples.
        cache_dir: directory of the index files; ``None`` means beside the data.
        masking_probability: share of the tokens that the model must predict.
        max_ngram: longest run of words that are masked together.
        whole_words: True to mask all pieces of a word, or none.
        short_probability: share of the samples that are shorter than ``seq_length`` would allow.
        allow_other_data: let ``fit`` resume a checkpoint that was trained on other data; it skips as many samples as
            were consumed.
        val_data_path: data of validation, read whole.
        test_data_path: data of tests, read whole.

    Raises:
        ConfigError: for arguments that cannot work.
    """

    fewest_sentences = 2
    _dataset_class = BertDataset

    @checked(
        SENTENCE_NAMES,
        **SENTENCE_RULES,
        seq_length=at_least(5),
        tokenizer_type=OneOf(WORD_PIECES),
    )
    def __init__(
        self,
        data_path: DataPaths,
        seq_length: int,
        vocab_file: str | os.PathLike[str],
        tokenizer_type: str = WORD_PIECES[0],
        batch_size: int = 1,
        split: str = "969,30,1",
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        masking_probability: float = 0.15,
        max_ngram: int = 3,
        whole_words: bool = True,
        short_probability: float = 0.1,
        allow_other_data: bool = False,
        val_data_path: DataPath | None = None,
        test_data_path: DataPath | None = None,
    ) -> None:
        self.masking = MaskingRule(masking_probability, max_ngram, whole_words)
        self.short_probability = short_probability
        super().__init__(
            data_path,
            seq_length,
            batch_size,
            split,
            train_samples,
            val_samples,
            test_samples,
            seed,
            num_workers,
            cache_dir,
            tokenizer_type=tokenizer_type,
            vocab_file=vocab_file,
            allow_other_data=allow_other_data,
            val_data_path=val_data_path,
            test_data_path=test_data_path,
        )

    def _problems(self) -> list[Problem]:
        return problems_of(Vocabulary.of, self._word_pieces)

    @property
    def _word_pieces(self) -> BertWordPieceTokenizer:
        assert isinstance(self.tokenizer, BertWordPieceTokenizer)
        return self.tokenizer

    def example_batch(self, rows: int) -> dict[str, Tensor]:
        """A batch of ``rows`` samples with the shapes of real ones, without padding."""
        shape = rows, self.seq_length
        ids = (torch.arange(rows * self.seq_length) % self._word_pieces.vocab_size).view(shape)
        masks = {"token_types": torch.zeros_like(ids), "padding_mask": torch.ones_like(ids)}
        return {"tokens": ids, "labels": ids.clone(), "is_random": torch.zeros(rows, dtype=torch.long), **masks}

    def _own_arguments(self) -> dict[str, Any]:
        return {"vocabulary": Vocabulary.of(self._word_pieces)}

    @property
    def _sample_options(self) -> dict[str, Any]:
        return {**vars(self.masking), "short_probability": self.short_probability}

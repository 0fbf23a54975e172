"""Samples for T5 in a LightningDataModule."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.arguments import OneOf, at_least, checked, within
from lightning_megatron.config.layout import BatchShape
from lightning_megatron.data.build import DataPath, DataPaths
from lightning_megatron.encoders.sentences.data_module import SENTENCE_NAMES, SENTENCE_RULES, SentenceDataModule
from lightning_megatron.encoders.sentences.masking import MaskingRule
from lightning_megatron.encoders.t5.dataset import SpanVocabulary, T5Dataset
from lightning_megatron.encoders.t5.span_vocabulary import TOKENIZERS, span_vocabulary
from lightning_megatron.errors import Problem, problems_of


class T5DataModule(SentenceDataModule):
    """Texts with gaps for the encoder, and the contents of the gaps for the decoder, from files of sentences.

    The files, Megatron's ``.bin`` / ``.idx``, are made with ``preprocess --split-sentences``. As with
    :class:`MegatronDataModule`, ranks of one replica read the same samples, in an order that depends on no layout, and
    a checkpoint in mid-epoch resumes at the next one.

    Args:
        data_path: prefix of a pair of files, a list of prefixes, or ``[weight, prefix, ...]``; only for training if
            ``val_data_path`` or ``test_data_path`` is given. Or a file of these, or one under each of ``train``,
            ``valid`` and ``test``.
        seq_length: tokens of the encoder, sentinels and padding counted.
        decoder_seq_length: tokens of the decoder, sentinels and padding counted.
        tokenizer_type: kind of the tokenizer with which the files were made: ``"HuggingFaceTokenizer"``,
            ``"GPTSentencePieceTokenizer"``, ``"BertWordPieceLowerCase"`` or ``"BertWordPieceCase"``.
        tokenizer_model: its file or directory.
        vocab_file: BERT's ``vocab.txt``, instead of ``tokenizer_model``.
        extra_ids: number of sentinels to append to a vocabulary that has none.
        batch_size: samples of one batch of one data-parallel replica.
        split: shares of the documents for training, validation and test, if ``data_path`` is for all three.
        train_samples: samples to draw for training, over as many epochs of the data as needed; ``None`` means as many
            as ``Trainer(max_steps=...)`` consumes, or one epoch of the data without it.
        val_samples: samples to draw for validation; ``None`` means one epoch of its share.
        test_samples: samples to draw for test; ``None`` as for ``val_samples``.
        seed: seed of samples and their order.
        num_workers: number of processes that load samples.
        cache_dir: directory of the index files; ``None`` means beside the data.
        masking_probability: share of the tokens in gaps.
        max_ngram: longest gap, in words.
        geometric: chance of each word to be the last of its gap.
        whole_words: True for gaps that begin and end with whole words.
        short_probability: share of the samples that are shorter than ``seq_length`` would allow.
        allow_other_data: let ``fit`` resume a checkpoint that was trained on other data; it skips as many samples as
            were consumed.
        val_data_path: data of validation, read whole.
        test_data_path: data of tests, read whole.

    Raises:
        ConfigError: for arguments that cannot work.
    """

    _dataset_class = T5Dataset

    @checked(
        SENTENCE_NAMES | {"encoder_seq_length": "seq_length", "vocab_extra_ids": "extra_ids"},
        **SENTENCE_RULES,
        seq_length=at_least(4),
        decoder_seq_length=at_least(3),
        extra_ids=at_least(1),
        tokenizer_type=OneOf(TOKENIZERS),
        geometric=within(0.0, 1.0),
    )
    def __init__(
        self,
        data_path: DataPaths,
        seq_length: int,
        decoder_seq_length: int,
        tokenizer_type: str = TOKENIZERS[0],
        tokenizer_model: str | os.PathLike[str] | None = None,
        vocab_file: str | os.PathLike[str] | None = None,
        extra_ids: int = 100,
        batch_size: int = 1,
        split: str = "969,30,1",
        train_samples: int | None = None,
        val_samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        masking_probability: float = 0.15,
        max_ngram: int = 10,
        geometric: float = 0.2,
        whole_words: bool = True,
        short_probability: float = 0.1,
        allow_other_data: bool = False,
        val_data_path: DataPath | None = None,
        test_data_path: DataPath | None = None,
    ) -> None:
        self.decoder_seq_length, self.extra_ids = decoder_seq_length, extra_ids
        self.masking = MaskingRule(masking_probability, max_ngram, whole_words, geometric)
        self.short_probability = short_probability
        self._vocabulary: SpanVocabulary | None = None
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
            tokenizer_model=tokenizer_model,
            vocab_file=vocab_file,
            allow_other_data=allow_other_data,
            val_data_path=val_data_path,
            test_data_path=test_data_path,
        )

    def _problems(self) -> list[Problem]:
        return problems_of(self._made_vocabulary)

    def _made_vocabulary(self) -> SpanVocabulary:
        assert self.tokenizer is not None
        if self._vocabulary is None:
            self._vocabulary = span_vocabulary(self.tokenizer, self.extra_ids)
        return self._vocabulary

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes that layouts and models are checked against; the vocabulary includes the sentinels."""
        return replace(super().batch_shape, vocab_size=len(self._made_vocabulary().continues))

    def example_batch(self, rows: int) -> dict[str, Tensor]:
        """A batch of ``rows`` samples with the shapes of real ones, without padding."""
        end = len(self._made_vocabulary().continues)
        read, written = ((rows, length) for length in (self.seq_length, self.decoder_seq_length))
        ids = torch.arange(rows * (self.seq_length + self.decoder_seq_length)) % end
        decoder = ids[: rows * self.decoder_seq_length].view(written)
        tokens = {"tokens": ids[: rows * self.seq_length].view(read), "decoder_tokens": decoder}
        return tokens | {"padding_mask": torch.ones(read, dtype=torch.long), "labels": decoder.clone()}

    def _own_arguments(self) -> dict[str, Any]:
        return {"vocabulary": self._made_vocabulary(), "decoder_seq_length": self.decoder_seq_length}

    @property
    def _sample_options(self) -> dict[str, Any]:
        own = {"decoder_seq_length": self.decoder_seq_length, "short_probability": self.short_probability}
        return {**vars(self.masking), **own, "sentinels": len(self._made_vocabulary().sentinels)}

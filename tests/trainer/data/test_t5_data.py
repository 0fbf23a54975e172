"""T5 from text to a resumed run: sentences, sentinels of three kinds of tokenizers, samples that no layout changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback

from lightning_megatron import ConfigError, MegatronStrategy, T5DataModule, T5Module
from lightning_megatron.data.tokenizers import build_tokenizer
from lightning_megatron.encoders.t5.span_vocabulary import span_vocabulary
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.main import main

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *SYLLABLES, *(f"##{each}" for each in SYLLABLES)]
EXTRA = 12
TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
TINY |= {"ffn_hidden_size": 32, "vocab_size": len(PIECES) + 2 + EXTRA, "vocab_multiple": 1}
TINY |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
STEPS, BATCH = 6, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ``vocab.txt``, and of ``corpus_text_sentence`` made by the command."""
    pytest.importorskip("tokenizers")
    folder, random = tmp_path_factory.mktemp("t5"), np.random.default_rng(1)

    def sentence() -> str:
        words = ["".join(random.choice(SYLLABLES, random.integers(1, 4))) for _ in range(random.integers(3, 12))]
        return " ".join(words).capitalize() + "."

    (folder / "vocab.txt").write_text("\n".join(PIECES))
    documents = [{"text": " ".join(sentence() for _ in range(random.integers(1, 9)))} for _ in range(60)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    words = ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(folder / "corpus"), "--split-sentences"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    assert main(["preprocess", *words]) == 0
    return folder


def data_module(folder: Path, **options: Any) -> T5DataModule:
    given: dict[str, Any] = {"seq_length": 48, "decoder_seq_length": 32, "batch_size": BATCH, "train_samples": 100}
    given |= {"split": "8,1,1", "cache_dir": folder / "cache", "vocab_file": folder / "vocab.txt"}
    given |= {"tokenizer_type": "BertWordPieceLowerCase", "extra_ids": EXTRA}
    return T5DataModule(folder / "corpus_text_sentence", **given | options)


class Seen(Callback):
    """Samples that this rank was given."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        names = ("tokens", "padding_mask", "decoder_tokens", "labels")
        for row in zip(*(batch[name].tolist() for name in names), strict=True):
            self.samples.append([token for part in row for token in part])


def fit(folder: Path, steps: int, before: Path | None = None, after: Path | None = None, **layout: Any) -> list[Any]:
    """Samples that this rank saw, in order."""
    dp, seen = layout.pop("dp", 1), Seen()
    trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=steps, callbacks=[seen], val_check_interval=steps)
    trainer.fit(T5Module("t5-tiny", **TINY), data_module(folder, batch_size=BATCH // dp), ckpt_path=before)
    if after is not None:
        trainer.save_checkpoint(after)
    assert np.isfinite(trainer.callback_metrics["val_loss"])
    return seen.samples


@pytest.mark.slow
def test_a_resumed_run_goes_on_at_its_sample_in_another_layout(ranks: Any, corpus: Path, tmp_path: Path) -> None:
    (whole,) = ranks(1, fit, corpus, STEPS)
    assert len(whole) == STEPS * BATCH
    (first,) = ranks(1, fit, corpus, 2, None, tmp_path / "2.ckpt")
    halves = ranks(2, fit, corpus, STEPS, tmp_path / "2.ckpt", dp=2)
    parts = [[half[step * 2 :][:2] for half in halves] for step in range(STEPS - 2)]
    assert first + [sample for step in parts for half in step for sample in half] == whole
    for same in ranks(2, fit, corpus, STEPS, pp=2):
        assert same == whole


def test_samples_are_padded_to_their_lengths_and_restore_the_text(corpus: Path) -> None:
    data = data_module(corpus)
    data.setup("fit")
    train = data._datasets[0]
    assert train is not None
    vocabulary = span_vocabulary(data.tokenizer, EXTRA)  # type: ignore[arg-type]
    begin, end = len(PIECES), len(PIECES) + 1
    assert (vocabulary.bos, vocabulary.eos, vocabulary.pad) == (begin, end, 0)
    assert data.batch_shape.vocab_size == len(PIECES) + 2 + EXTRA == TINY["vocab_size"]
    for number in range(0, 100, 7):
        sample = train[number]
        assert {name: len(value) for name, value in sample.items()} == {
            "tokens": 48, "padding_mask": 48, "decoder_tokens": 32, "labels": 32,
        }  # fmt: skip
        written = [token for token in sample["labels"].tolist() if token != -100]
        assert written[-1] == end
        assert sample["decoder_tokens"].tolist()[: len(written)] == [begin, *written[:-1]]
        used = [token for token in sample["tokens"].tolist() if token in vocabulary.sentinels]
        assert used == list(range(len(PIECES) + 2, len(PIECES) + 2 + len(used)))
        assert [token for token in written if token in vocabulary.sentinels] == used


def test_sentinels_of_other_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "\u2581a": 3, "b": 4, "\u2581": 5}
    special = [f"<extra_id_{number}>" for number in (2, 1, 0)]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    with pytest.raises(ConfigError, match=r"has no <extra_id_0>"):
        span_vocabulary(build_tokenizer("HuggingFaceTokenizer", tmp_path), 100)
    backend.add_special_tokens(special)
    backend.save(str(tmp_path / "tokenizer.json"))
    found = span_vocabulary(build_tokenizer("HuggingFaceTokenizer", tmp_path), 100)
    assert found.sentinels == (8, 7, 6)  # <extra_id_0> first
    assert (found.bos, found.eos, found.pad) == (0, 1, 0)
    assert found.continues.nonzero()[0].tolist() == [4]
    with pytest.raises(ConfigError, match="tokenizer_type"):
        span_vocabulary(build_tokenizer("NullTokenizer", vocab_size=8), 100)


def test_sentinels_behind_a_sentencepiece_model_are_those_of_transformers(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join("".join(SYLLABLES[i : i + 9]) + " " + SYLLABLES[i] for i in range(50)))
    how = {"vocab_size": 60, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "sp"), **how)
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tmp_path / "sp.model")
    found = span_vocabulary(tokenizer, 5)
    assert found.sentinels == (64, 63, 62, 61, 60)
    assert len(found.continues) == 65
    assert (found.bos, found.eos, found.pad) == (0, 1, 0)
    begins = [i for name, i in tokenizer.vocabulary().items() if name.startswith("\u2581")]  # type: ignore[attr-defined]
    assert not found.continues[[0, 1, 2, *begins, *found.sentinels]].any()
    assert found.continues.sum() == 60 - 3 - len(begins)


def test_shares_and_vocabularies_that_cannot_work_are_named(corpus: Path) -> None:
    assert data_module(corpus).data_problems() == []
    (problem,) = data_module(corpus, split="1000,1,0", val_samples=5).data_problems()
    assert problem.argument == "val_samples"
    with pytest.raises(ConfigError, match="tokenizer_type='GPT2BPETokenizer'"):
        data_module(corpus, tokenizer_type="GPT2BPETokenizer")
    with pytest.raises(ConfigError, match=r"encoder_seq_length(.|\n)*seq_length"):
        data_module(corpus, encoder_seq_length=5)


def test_the_fingerprint_has_what_samples_depend_on(corpus: Path) -> None:
    usual = data_module(corpus).fingerprint
    changes = ({"masking_probability": 0.2}, {"max_ngram": 1}, {"whole_words": False}, {"short_probability": 0.0})
    for change in (*changes, {"geometric": 0.0}, {"decoder_seq_length": 40}, {"extra_ids": 9}):
        assert data_module(corpus, **change).fingerprint != usual
    assert data_module(corpus, train_samples=7).fingerprint == usual

"""BERT from text to a resumed run: sentences, word pieces, samples that no layout changes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback

from lightning_megatron import (
    BertDataModule,
    BertModule,
    ConfigError,
    MegatronDataModule,
    MegatronStrategy,
    T5DataModule,
)
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.main import main

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *SYLLABLES, *(f"##{each}" for each in SYLLABLES)]
TINY: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": len(PIECES)}
TINY |= {"max_position_embeddings": 48, "vocab_multiple": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0}
STEPS, BATCH = 6, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ``vocab.txt``, and of ``corpus_text_sentence`` made by the command."""
    pytest.importorskip("tokenizers")
    folder, random = tmp_path_factory.mktemp("bert"), np.random.default_rng(1)

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


def data_module(folder: Path, **options: Any) -> BertDataModule:
    given: dict[str, Any] = {"seq_length": 48, "batch_size": BATCH, "train_samples": 100, "split": "8,1,1"}
    given |= {"cache_dir": folder / "cache", "vocab_file": folder / "vocab.txt"}
    return BertDataModule(folder / "corpus_text_sentence", **given | options)


class Seen(Callback):
    """Samples that this rank was given."""

    def __init__(self) -> None:
        self.samples: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for tokens, labels, is_random in zip(batch["tokens"], batch["labels"], batch["is_random"], strict=True):
            self.samples.append([*tokens.tolist(), *labels.tolist(), int(is_random)])


def fit(folder: Path, steps: int, before: Path | None = None, after: Path | None = None, **layout: Any) -> list[Any]:
    """Samples that this rank saw, in order."""
    dp, seen = layout.pop("dp", 1), Seen()
    trainer = quiet_trainer(MegatronStrategy(**layout), max_steps=steps, callbacks=[seen], val_check_interval=steps)
    trainer.fit(BertModule("bert-tiny", **TINY), data_module(folder, batch_size=BATCH // dp), ckpt_path=before)
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
    for same in ranks(2, fit, corpus, STEPS, tp=2, sequence_parallel=True):
        assert same == whole


def test_shares_and_vocabularies_that_cannot_work_are_named(corpus: Path, tmp_path: Path) -> None:
    assert data_module(corpus).data_problems() == []
    (problem,) = data_module(corpus, split="1000,1,0", val_samples=5).data_problems()
    assert problem.argument == "val_samples"
    (tmp_path / "vocab.txt").write_text("\n".join(piece for piece in PIECES if piece != "[MASK]"))
    with pytest.raises(ConfigError, match=r"no \[MASK\]"):
        data_module(corpus, vocab_file=tmp_path / "vocab.txt")
    with pytest.raises(ConfigError, match="tokenizer_type='GPT2BPETokenizer'"):
        data_module(corpus, tokenizer_type="GPT2BPETokenizer")


def test_the_fingerprint_has_what_samples_depend_on(corpus: Path) -> None:
    usual = data_module(corpus).fingerprint
    for change in ({"masking_probability": 0.2}, {"max_ngram": 1}, {"whole_words": False}, {"short_probability": 0.0}):
        assert data_module(corpus, **change).fingerprint != usual
    assert data_module(corpus, train_samples=7).fingerprint == usual


class OfAUser(BertDataModule):
    """One that fixes an argument, and so has no ``val_data_path``."""

    def __init__(self, data_path: Any, vocab_file: Path, split: str = "1", **options: Any) -> None:
        super().__init__(data_path, 48, train_samples=9, vocab_file=vocab_file, split=split, **options)


MODULES = {
    "plain": lambda path, vocab, **given: MegatronDataModule(path, 16, **given),
    "BERT": lambda path, vocab, **given: BertDataModule(path, 48, vocab_file=vocab, **given),
    "T5": lambda path, vocab, **given: T5DataModule(
        path, 48, decoder_seq_length=32, vocab_file=vocab, tokenizer_type="BertWordPieceLowerCase", extra_ids=4, **given
    ),
    "a user's": lambda path, vocab, **given: OfAUser(path, vocab, **given),
}


def arguments_of(kind: type) -> set[str]:
    """Names that a class takes, those of its parent where it passes on what it does not name."""
    own = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    passes_on = any(each.kind is each.VAR_KEYWORD for each in own)
    return {each.name for each in own} | (arguments_of(kind.__mro__[1]) if passes_on else set())


@pytest.mark.parametrize(("split", "empty"), [(None, "test_samples"), ("1", None), ("999,1", "val_samples")], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_warnings_name_arguments_that_the_class_has(
    corpus: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder, name: str, split: str | None, empty: str | None
) -> None:
    """Of every data module of token files, with its defaults and with a share of no sample."""
    options: dict[str, Any] = {} if split is None else {"split": split}
    options |= {} if name == "a user's" else {"train_samples": 9}
    data = MODULES[name](corpus / "corpus_text_sentence", corpus / "vocab.txt", cache_dir=tmp_path, **options)
    for stage in ("fit", "validate", "test"):
        data.setup(stage)
    said = [str(warning.message) for warning in recwarn if "no sample" in str(warning.message)]
    if name == "a user's" and split is None:
        empty = None  # its own default is "1"
    assert [text.rpartition(" for ")[2] for text in said] == [empty] * (empty is not None)
    assert empty is None or {empty, "split"} <= arguments_of(type(data))

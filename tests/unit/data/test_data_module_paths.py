"""Data of validation from files of its own, and GPT-2's tokenizer by its two files, through ``MegatronDataModule``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron import LlamaModule, MegatronDataModule
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.testing.trainer import quiet_trainer


def write(path: Path, first: int) -> str:
    """Documents of numbers from ``first`` on."""
    with IndexedDatasetWriter(str(path), np.dtype(np.uint16)) as writer:
        for start in range(20):
            writer.add_item(np.arange(first + start, first + start + 30).astype(np.uint16))
            writer.end_document()
    return str(path)


def tokens_of(loader: Any) -> set[int]:
    return {int(token) for batch in loader for token in batch["tokens"].flatten()}


def test_each_share_reads_the_files_that_were_named_for_it(tmp_path: Path) -> None:
    paths = {name: write(tmp_path / name, first) for name, first in {"a": 0, "b": 1000, "c": 2000}.items()}
    data = MegatronDataModule(
        paths["a"], 8, batch_size=2, val_data_path=paths["b"], test_data_path=paths["c"], train_samples=16
    )
    data.trainer = quiet_trainer(max_steps=1)
    for stage in ("fit", "test"):
        data.setup(stage)
    assert max(tokens_of(data.train_dataloader())) < 1000
    assert {token // 1000 for token in tokens_of(data.val_dataloader())} == {1}
    assert {token // 1000 for token in tokens_of(data.test_dataloader())} == {2}


def test_a_share_of_nothing_is_not_evaluated(tmp_path: Path) -> None:
    """Megatron-LM's way to measure speed, ``--split 100,0,0``: training alone, unless samples are asked for."""
    path, options = write(tmp_path / "a", 0), {"split": "100,0,0", "train_samples": 8, "cache_dir": tmp_path}
    data = MegatronDataModule(path, 8, 4, **options)
    data.trainer = quiet_trainer(max_steps=2)
    data.setup("fit")
    assert len(data.train_dataloader()) > 0
    assert data.val_dataloader() == []
    (problem,) = MegatronDataModule(path, 8, 4, **options, val_samples=4).data_problems()
    assert str(problem) == "val_samples=4: split='100,0,0' has no share for them; nearest valid: 0, None"


def test_a_share_without_tokens_is_named_once_where_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    data = MegatronDataModule(write(tmp_path / "a", 0), 8, split="9999,9999,1", cache_dir=tmp_path)
    for stage, texts in (("fit", 0), ("test", 1)):
        data.prepare_data()
        data.setup(stage)
        told = [str(warned.message) for warned in recwarn] + caplog.messages
        assert len([text for text in told if text.startswith("split='9999,9999,1' of ")]) == texts
        assert len(told) == texts


def test_data_with_fewer_tokens_than_a_sample_are_named(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A validation goes without them; a training cannot, and does not end after no step."""
    path = write(tmp_path / "a", 0)  # of 600 tokens
    data = MegatronDataModule(path, 600, train_samples=2, val_data_path=path)
    data.setup("fit")
    assert len(data.train_dataloader()) == 2
    assert data.val_dataloader() == []
    assert [str(warned.message) for warned in recwarn] == [f"{path} has no sample of 600 tokens for val_samples"]
    with pytest.raises(DataError, match=f"split='1' of {path} has no sample of 600 tokens for train_samples"):
        MegatronDataModule(path, 600, split="1").setup("fit")


def test_gpt2s_tokenizer_is_named_by_its_two_files(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a lazy dog"] * 9, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(tmp_path))
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    data = MegatronDataModule(
        write(tmp_path / "a", 0), 8, tokenizer_type="GPT2BPETokenizer", eod_mask_loss=True, **files
    )
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.tokenizer.encode("a lazy dog")) == "a lazy dog"
    assert data.batch_shape.vocab_size == data.tokenizer.vocab_size == bpe.get_vocab_size()
    with pytest.raises((ConfigError, ValueError), match=r"merges\.txt|merge_file"):
        MegatronDataModule(str(tmp_path / "a"), 8, tokenizer_type="GPT2BPETokenizer", vocab_file=files["vocab_file"])


def test_a_tokenizer_beside_the_data_is_found(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "lazy", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    path, kind = write(tmp_path / "a", 0), "BertWordPieceLowerCase"
    data = MegatronDataModule([0.5, path, 0.5, path], 8, tokenizer_type=kind)
    assert data.tokenizer is not None
    assert data.tokenizer.encode("A lazy dog") == [5, 6, 7]
    (other := tmp_path / "other").mkdir()
    (other / "vocab.txt").write_text("\n".join([*words, "cat"]))
    named = MegatronDataModule(path, 8, tokenizer_type=kind, tokenizer_model=other)
    assert named.batch_shape.vocab_size == 9
    with pytest.raises(ConfigError, match=r"named or as tokenizer\.model beside the data"):
        MegatronDataModule(path, 8, tokenizer_type="GPTSentencePieceTokenizer")


def test_documents_of_samples_see_nothing_of_each_other_if_wanted(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    options: dict[str, Any] = {"tokenizer_type": "BertWordPieceLowerCase", "train_samples": 8, "cache_dir": tmp_path}
    data = MegatronDataModule(str(tmp_path / "a"), 12, 2, "100,0,0", **options, reset_attention_mask=True)
    assert data.tokenizer is not None
    eod = data.tokenizer.eod
    with IndexedDatasetWriter(str(tmp_path / "a"), np.dtype(np.uint16)) as writer:
        for length in (3, 5, 2, 7, 4) * 9:
            writer.add_item(np.array([5] * length + [eod], np.uint16))
            writer.end_document()
    data.trainer = quiet_trainer(max_steps=2)
    data.setup("fit")
    for batch in data.train_dataloader():
        ended = batch["tokens"] == eod
        torch.testing.assert_close(batch["segment_ids"], 1 + ended.cumsum(1) - ended.long())
        assert batch["segment_ids"].max() > 1
        assert LlamaModule("llama-tiny", num_layers=1).loss(batch).isfinite()
    plain = MegatronDataModule(str(tmp_path / "a"), 12, 2, "100,0,0", **options)
    assert "reset_attention_mask" not in plain._sample_options  # checkpoints from before the argument go on
    with pytest.raises(ConfigError, match="reset_attention_mask=True: needs to know the end-of-document token"):
        MegatronDataModule(str(tmp_path / "a"), 12, reset_attention_mask=True)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_sample_is_predicted_in_its_order(batch_size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a", 0)
    data = MegatronDataModule(path, 8, batch_size, test_data_path=path, test_samples=21)
    data.trainer = quiet_trainer(max_steps=1)
    data.setup("predict")
    loader = data.predict_dataloader()
    rows = torch.cat([batch["tokens"] for batch in loader])
    assert torch.equal(rows, torch.stack([sample["tokens"] for sample in loader.dataset]))
    assert len(loader) == -(-len(rows) // batch_size)

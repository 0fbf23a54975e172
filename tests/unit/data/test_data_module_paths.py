"""Data of validation from files of its own, and GPT-2's tokenizer by its two files, through ``MegatronDataModule``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron import MegatronDataModule
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.errors import ConfigError
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

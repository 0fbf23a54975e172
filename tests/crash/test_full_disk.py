"""A disk that is full, for whatever writes: an error that names the file, and nothing half-written."""

from __future__ import annotations

import io
import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import numpy as np
import pytest
import torch

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.data import DataError, IndexedDatasetWriter, build_gpt_datasets
from lightning_megatron.testing.trainer import quiet_trainer
from lightning_megatron.tools.cli.main import main
from tests.tiny import tiny_llama

ROOM = 2048  # bytes that a file may have


@contextmanager
def full_disk() -> Iterator[None]:
    """Files cannot grow above a size, of which the system says "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run_commands(folder):
    """Exit status of each command that writes, what it prints, and what it leaves."""
    lines = (json.dumps({"text": " ".join(str(n % 50) for n in range(i, i + 40))}) for i in range(200))
    (folder / "in.jsonl").write_text("\n".join(lines))
    rows = [{"tokens": torch.arange(8), "labels": torch.arange(8)}] * 2
    trainer = quiet_trainer(MegatronStrategy(), max_steps=1)
    trainer.fit(LlamaModule(tiny_llama()), torch.utils.data.DataLoader(rows))
    trainer.save_checkpoint(folder / "our.ckpt")
    assert main(["convert", "ckpt-to-hf", str(folder / "our.ckpt"), str(folder / "hf")]) == 0
    text, out = ["--input", folder / "in.jsonl"], folder / "out"
    numbers = ["--output-prefix", out / "pair", "--tokenizer-type", "NullTokenizer", "--vocab-size", 64]
    commands = {
        "preprocess": [*text, *numbers],
        "train-tokenizer": [*text, "--output", out / "a.model", "--vocab-size", 270],
        "convert ckpt-to-hf": [folder / "our.ckpt", out / "hf"],
        "convert hf-to-ckpt": [folder / "hf", out / "again.ckpt"],
    }
    found = {}
    for name, words in commands.items():
        said = io.StringIO()
        with full_disk(), redirect_stderr(said), redirect_stdout(said):
            status = main([*name.split(), *map(str, words)])
        found[name] = status, said.getvalue(), files(out)
    return found


@pytest.mark.slow
def test_commands_name_the_file_that_finds_no_space_and_leave_nothing(tmp_path, ranks):
    found = ranks(1, run_commands, tmp_path)[0]
    for name, file in {
        "preprocess": "pair_text_document.bin",
        "train-tokenizer": "a.model",
        "convert ckpt-to-hf": "model.safetensors",
        "convert hf-to-ckpt": "again.ckpt",
    }.items():
        status, said, left = found[name]
        assert (status, left) == (2, set()), (name, said)
        assert file in said.splitlines()[-1], said
        assert "File too large" in said.splitlines()[-1], said


def write_documents(prefix, count, size):
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(count):
            writer.add_document(np.arange(size), [size])


def write_token_files(folder):
    """Errors if a pair, and the indices of another, find no space; and the files at the end."""
    write_documents(folder / "good", 40, 100)
    build = {"seq_length": 16, "num_samples": (2000, 0, 0), "split": "1,0,0"}
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lightning_megatron").addHandler(handler)
    errors = []
    with full_disk():
        for count, size in ((40, 100), (1, 4000), (400, 1)):  # in the middle, at once, in the index alone
            with pytest.raises(OSError, match="too large") as full:
                write_documents(folder / "full", count, size)
            errors.append(str(full.value))
        with pytest.raises(DataError) as refused:
            build_gpt_datasets([str(folder / "good")], cache_dir=folder / "named", **build)
        (dataset, *_) = build_gpt_datasets([str(folder / "good")], **build)
    logging.getLogger("lightning_megatron").removeHandler(handler)
    return [*errors, str(refused.value), said.getvalue()], files(folder), len(dataset)


def test_token_files_and_the_index_cache_leave_nothing_half_written(tmp_path, ranks):
    said, left, samples = ranks(1, write_token_files, tmp_path)[0]
    assert samples >= 2000  # from memory, where no cache was named
    for text, place in zip(said, ("full.bin", "full.bin", "full.idx", "named", "cache"), strict=True):
        assert place in text
        assert "File too large" in text
    assert {name for name in left if not name.endswith(".npy")} == {"good.bin", "good.crc", "good.idx"}
    assert all(np.load(tmp_path / name).size for name in left if name.endswith(".npy"))  # whole ones

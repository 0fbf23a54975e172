"""The commands ``merge``, ``inspect`` and ``demo-data``: bytes against preprocessing, numbers against a plain count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data import IndexedDataset, IndexedDatasetWriter, build_gpt_datasets, build_tokenizer
from lightning_megatron.data import indexed_writer as writing
from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess
from lightning_megatron.files import free_space
from lightning_megatron.tools.cli.data.demo import demo_data_command
from lightning_megatron.tools.cli.data.inspect import inspect_command
from lightning_megatron.tools.cli.data.merge import merge_command

IDS = TokenizerSpec("NullTokenizer", vocab_size=100)
TEXTS = [" ".join(str(n % 100) for n in range(i % 9)) for i in range(50)]


def tokenized(folder: Path, name: str, texts: list[str], **options: Any) -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (prefix,) = preprocess([folder / f"{name}.jsonl"], folder / name, IDS, log=lambda line: None, **options)
    return prefix


def content(prefix: str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("block", [3, 1 << 16])
def test_merging_gives_the_bytes_of_preprocessing_all(
    tmp_path: Path, sentences: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_INDEX_BLOCK", block)
    texts = [text.replace(" 5 ", "\n\n") for text in TEXTS]
    options = {"split_sentences": sentences, "append_eod": True}
    shares = {"b": texts[:20], "a": texts[20:21], "c": texts[21:]}
    prefixes = [tokenized(tmp_path, name, share, **options) for name, share in shares.items()]
    whole = tokenized(tmp_path, "whole", texts, **options)
    assert merge_command(["--input", *prefixes, "--output-prefix", str(tmp_path / "out" / "merged")]) == 0
    assert content(str(tmp_path / "out" / "merged")) == content(whole)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["merged.bin", "merged.crc", "merged.idx"]


def test_a_folder_stands_for_its_pairs_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, share in {"b": TEXTS[20:], "a": TEXTS[:20]}.items():
        tokenized(tmp_path, name, share)
    assert merge_command(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "merged")]) == 0
    assert content(str(tmp_path / "merged")) == content(tokenized(tmp_path, "whole", TEXTS))
    assert capsys.readouterr().out.endswith("merged.bin and .idx: 50 documents, 190 tokens (uint16)\n")


def test_what_cannot_be_merged_is_named_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, half = tokenized(tmp_path, "good", TEXTS), tokenized(tmp_path, "half", TEXTS)
    Path(f"{half}.bin").unlink()
    with IndexedDatasetWriter(tmp_path / "wide", np.int32) as writer:
        writer.add_document([1], [1])
    inputs = [good, half, str(tmp_path / "wide"), str(tmp_path / "none")]
    assert merge_command(["--input", *inputs, "--output-prefix", good]) == 2
    text = capsys.readouterr().err
    assert "4 problems" in text
    for part in ("half_text_document.bin not found", "none.idx", "its tokens are int32", "is one of the inputs"):
        assert part in text
    (tmp_path / "empty").mkdir()
    assert merge_command(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "out")]) == 2
    assert "empty: has no .bin and .idx" in capsys.readouterr().err
    usage = free_space.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: usage._replace(free=10))
    assert merge_command(["--input", good, "--output-prefix", str(tmp_path / "out")]) == 2
    assert "the output will take about" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_statistics_and_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tokenized(tmp_path, "x", TEXTS, append_eod=True)
    tokens = [[*map(int, text.split()), 100] if text else [] for text in TEXTS]
    lengths = [len(ids) for ids in tokens]
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    assert inspect_command([prefix, "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    flat = [token for ids in tokens for token in ids]
    assert found == {
        "dtype": "uint16",
        "documents": 50,
        "empty": lengths.count(0),
        "sequences": len([n for n in lengths if n]),
        "tokens": len(flat),
        "size": 2 * len(flat),
        "least": min(flat),
        "largest": max(flat),
        "ends": flat.count(100),
        "shortest": 0,
        "mean": pytest.approx(np.mean(lengths)),
        "longest": max(lengths),
        "percentiles": {str(p): sorted(lengths)[int(np.ceil(p / 100 * 50)) - 1] for p in (5, 50, 95)},
    }
    assert inspect_command([prefix, "--document", "8", *words]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "documents   50, 6 of them empty"
    assert text.endswith(f"document 8: 9 tokens\n{TEXTS[8]} 100\n\n{TEXTS[8]} 100\n")
    assert inspect_command([prefix, "--document", "50"]) == 2
    assert "--document=50" in capsys.readouterr().err
    assert inspect_command([prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]) == 2
    assert "holds the id 100, and the tokenizer has 51 tokens" in capsys.readouterr().err


def test_sample_k_is_the_one_that_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tokenized(tmp_path, "x", TEXTS)
    before = sorted(path.name for path in tmp_path.iterdir())
    line = [prefix, "--sample", "7", "--seq-length", "8", "--samples", "60", "--split", "9,1", "--seed", "5"]
    assert inspect_command(line) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is written beside the data"
    options = {"num_samples": (60, 0, 0), "split": "9,1", "seed": 5, "cache_dir": tmp_path / "cache"}
    train = build_gpt_datasets(prefix, seq_length=8, **options)[0]
    assert train is not None
    expected = [*train[7]["tokens"].tolist(), int(train[7]["labels"][-1])]
    assert capsys.readouterr().out.splitlines()[-1] == " ".join(map(str, expected))
    assert inspect_command([prefix, "--sample", "7"]) == 2
    assert "--seq-length=None: is needed for --sample" in capsys.readouterr().err
    assert inspect_command([*line[:2], "9999", *line[3:]]) == 2
    assert "--sample=9999: there are" in capsys.readouterr().err


def test_an_empty_pair_has_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(tmp_path / "none", np.uint16):
        pass
    assert inspect_command([str(tmp_path / "none"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["least"], found["longest"]) == (0, 0, None, 0)


def test_demo_data_are_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        line = ["--output", str(tmp_path / name), "--documents", "200", "--vocab-size", "400", "--seed", "3"]
        assert demo_data_command(line) == 0
    files = {name: sorted((tmp_path / name).iterdir()) for name in ("a", "b")}
    names = ["corpus.jsonl", *(f"corpus_text_document.{end}" for end in ("bin", "crc", "idx")), "tokenizer.model"]
    assert [path.name for path in files["a"]] == names
    assert [path.read_bytes() for path in files["a"]] == [path.read_bytes() for path in files["b"]]
    assert "lightning-megatron fit " in capsys.readouterr().out
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tmp_path / "a" / "tokenizer.model")
    first = json.loads((tmp_path / "a" / "corpus.jsonl").open().readline())["text"]
    dataset = IndexedDataset(tmp_path / "a" / "corpus_text_document")
    assert tokenizer.decode(dataset[0][:-1].tolist()) == first
    assert demo_data_command(["--output", str(tmp_path / "c"), "--documents", "0"]) == 2

import bz2
import gzip
import json
import lzma
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lightning_megatron.data import DataError, IndexedDataset
from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess
from lightning_megatron.data.preprocessing.sentences import split_sentences
from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.data.preprocess import preprocess_command
from lightning_megatron.tools.cli.data.tokenizer import train_tokenizer_command

IDS = TokenizerSpec("NullTokenizer", vocab_size=100)
RECORDS = [{"text": f"{i} {i + 1}", "title": f"{i % 7}", "other": [i]} for i in range(90)]
RECORDS[5]["text"] = ""

WriteLines = Callable[..., Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    def write(records: list[Any], name: str = "corpus.jsonl", opener: Any = open) -> Path:
        with opener(tmp_path / name, "wb") as file:
            for record in records:
                file.write(record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")
        return tmp_path / name

    return write


def quiet(line: str) -> None:
    """Takes the log."""


def contents(prefix: str) -> list[list[int]]:
    return [s.tolist() for s in IndexedDataset(prefix)[:]]


def test_documents_and_their_ends(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines(RECORDS)
    (prefix,) = preprocess([source], tmp_path / "out", IDS, append_eod=True, log=quiet)
    assert prefix == str(tmp_path / "out_text_document")
    dataset = IndexedDataset(prefix)
    assert dataset.dtype.name == "uint16"
    assert contents(prefix)[:6] == [[i, i + 1, 100] for i in (0, 1, 2, 3, 4, 6)]
    assert len(dataset.document_indices) == 91, "the empty text is an empty document"
    assert dataset.document_indices[:8].tolist() == [0, 1, 2, 3, 4, 5, 5, 6]


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("append_eod", [False, True])
def test_a_text_has_one_end_token_and_an_empty_one_has_none_whatever_the_tokenizer_adds(
    write_lines: WriteLines, tmp_path: Path, adds: str, append_eod: bool
) -> None:
    """Held against arithmetic."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = [("<s>", 1), ("</s>", 2)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=adds, special_tokens=special)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    source = write_lines([{"text": text} for text in ("a b", "", "b", " ")])
    spec = TokenizerSpec("HuggingFaceTokenizer", str(tmp_path))
    (prefix,) = preprocess([source], tmp_path / "out", spec, append_eod=append_eod, log=quiet)
    begin, end = [1] * ("<s>" in adds), [2] * (append_eod or "</s>" in adds)
    assert contents(prefix) == [[*begin, 3, 4, *end], [*begin, 4, *end]]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 1, 1, 2, 2]


def test_several_keys_make_several_pairs(write_lines: WriteLines, tmp_path: Path) -> None:
    prefixes = preprocess([write_lines(RECORDS)], tmp_path / "out", IDS, json_keys=("text", "title"), log=quiet)
    assert prefixes == [str(tmp_path / "out_text_document"), str(tmp_path / "out_title_document")]
    assert contents(prefixes[1])[:8] == [[0], [1], [2], [3], [4], [5], [6], [0]]


def test_workers_do_not_change_a_byte(write_lines: WriteLines, tmp_path: Path) -> None:
    sources = [write_lines(RECORDS * 3, "a.jsonl"), write_lines(RECORDS[::-1], "b.jsonl")]
    for workers in (1, 2):
        preprocess(
            sources,
            tmp_path / f"{workers}",
            IDS,
            json_keys=("text", "title"),
            workers=workers,
            append_eod=True,
            log=quiet,
        )
    for key in ("text", "title"):
        for ending in ("bin", "idx"):
            name = f"{key}_document.{ending}"
            assert (tmp_path / f"1_{name}").read_bytes() == (tmp_path / f"2_{name}").read_bytes()


def test_workers_run_whatever_the_length_of_tmpdir(
    write_lines: WriteLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer_than_a_socket_may_be = tmp_path / ("x" * 110)
    longer_than_a_socket_may_be.mkdir()
    monkeypatch.setenv("TMPDIR", str(longer_than_a_socket_may_be))
    command = ["preprocess", "--input", str(write_lines(RECORDS)), "--output-prefix", str(tmp_path / "out")]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--workers", "2"]
    subprocess.run([sys.executable, "-m", "lightning_megatron.tools.cli.main", *command], check=True)
    assert contents(tmp_path / "out_text_document")


def test_an_error_in_a_worker_names_the_line(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines([*RECORDS[:9], {"text": "seven"}])
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 10: NullTokenizer reads token ids"):
        preprocess([source], tmp_path / "out", IDS, workers=2, strict=True, log=quiet)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(("ending", "opener"), [("gz", gzip.open), ("xz", lzma.open), ("bz2", bz2.open)])
def test_compressed_input(write_lines: WriteLines, tmp_path: Path, ending: str, opener: Any) -> None:
    (plain,) = preprocess([write_lines(RECORDS)], tmp_path / "plain", IDS, log=quiet)
    source = write_lines(RECORDS, f"corpus.jsonl.{ending}", opener)
    (packed,) = preprocess([source], tmp_path / "packed", IDS, log=quiet)
    assert contents(packed) == contents(plain)


def test_zst_without_the_package(write_lines: WriteLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    missing = r"c\.jsonl\.zst: cannot be .*zstandard is not installed: pip install '\.\[data\]' in a clone"
    with pytest.raises(DataError, match=missing):
        preprocess([write_lines([b"x"], "c.jsonl.zst")], tmp_path / "out", IDS, log=quiet)


def test_zst_with_the_package(write_lines: WriteLines, tmp_path: Path) -> None:
    import zstandard  # one of the packages for development: this is not to be skipped

    source = write_lines(RECORDS, "c.jsonl.zst", zstandard.open)
    (prefix,) = preprocess([source], tmp_path / "out", IDS, log=quiet)
    assert len(contents(prefix)) == 89
    source.write_bytes(source.read_bytes()[:30] + b"junk" + source.read_bytes()[34:])
    with pytest.raises(DataError, match=r"c\.jsonl\.zst: cannot be decompressed after line \d+"):
        preprocess([source], tmp_path / "broken", IDS, log=quiet)


def test_the_log(write_lines: WriteLines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(RECORDS)
    preprocess([source], tmp_path / "out", IDS, log_interval=40)
    lines = capsys.readouterr().err.splitlines()
    estimate = lines.pop(0)
    assert re.fullmatch(r"Estimate: about 90 documents, \d+ tokens, 0\.0 MB; [\d.,]+ GB are free", estimate)
    assert lines[0] == f"Opening {source}"
    assert re.fullmatch(r"Time to startup: \d+\.\d\d", lines[1])
    pattern = r"Processed (\d+) documents \((\d+\.\d\d) docs/s, (\d+\.\d\d\d\d) MB/s\)\."
    found = [re.fullmatch(pattern, line) for line in lines[2:-1]]
    assert [int(m[1]) for m in found if m] == [40, 80, 90]
    assert found[2]
    seconds = 90 / float(found[2][2])
    assert float(found[2][3]) * seconds * 2**20 == pytest.approx(source.stat().st_size, rel=0.1)
    bytes_written = (tmp_path / "out_text_document.bin").stat().st_size
    tokens = bytes_written // IndexedDataset(tmp_path / "out_text_document").dtype.itemsize
    size = f"{bytes_written / 2**20:.2f} MB"
    assert lines[-1] == f"Wrote {tmp_path / 'out_text_document'}.bin and .idx: 90 documents, {tokens:,} tokens, {size}"


def test_patterns_are_read_in_order(write_lines: WriteLines, tmp_path: Path) -> None:
    for name, token in (("b.jsonl", "2"), ("a.jsonl", "1"), ("z.jsonl", "3")):
        write_lines([{"text": token}], name)
    (prefix,) = preprocess([tmp_path / "z.jsonl", tmp_path / "[ab].jsonl"], tmp_path / "out", IDS, log=quiet)
    assert contents(prefix) == [[3], [1], [2]]


def test_blank_lines_are_left_out_and_counted(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines([b"\n", {"text": "1"}, b"  \n", {"text": "x"}])
    with pytest.raises(DataError, match="line 4"):
        preprocess([source], tmp_path / "out", IDS, strict=True, log=quiet)


FAULTS: list[tuple[list[Any], str]] = [
    ([{"text": "1"}, b"{oops}\n"], r"corpus\.jsonl, line 2: not JSON \(.*\); every line must be one JSON object"),
    ([b'{"text": "1"'], r"corpus\.jsonl, line 1: not JSON"),
    ([b'{"text": "\xff"}\n'], r"corpus\.jsonl, line 1: not JSON \(.*utf-8"),
    ([{"text": "1"}] * 2 + [["text"]], r"corpus\.jsonl, line 3: a JSON list, not an object; write one object a line"),
    (
        [{"body": "1", "id": 2}],
        r"corpus\.jsonl, line 1: has no key 'text', only 'body', 'id'; name .*--json-keys",
    ),
    ([{"text": 5}], r"corpus\.jsonl, line 1: the value of 'text' is int, not text"),
    ([{"text": None}], r"corpus\.jsonl, line 1: the value of 'text' is NoneType, not text"),
    ([{"text": "101"}], r"corpus\.jsonl, line 1: token id 101 is not in a vocabulary of 100"),
    ([], r"corpus\.jsonl: no documents; the corpus is empty"),
    ([b"\n\n"], r"corpus\.jsonl: no documents; the corpus is empty"),
]


@pytest.mark.parametrize(("records", "text"), FAULTS)
def test_faulty_lines(write_lines: WriteLines, tmp_path: Path, records: list[Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        preprocess([write_lines(records)], tmp_path / "out", IDS, strict=True, log=quiet)
    assert not list(tmp_path.glob("out*")), "nothing is left behind"


def test_faulty_files(write_lines: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file; check --input"):
        preprocess([tmp_path / "none.jsonl"], tmp_path / "out", IDS, log=quiet)
    with pytest.raises(DataError, match=r"\*\.json: no file matches"):
        preprocess([tmp_path / "*.json"], tmp_path / "out", IDS, log=quiet)
    source = write_lines(RECORDS, "c.jsonl.gz", gzip.open)
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"c\.jsonl\.gz: cannot be decompressed after line \d+ .*; fetch the file"):
        preprocess([source], tmp_path / "out", IDS, log=quiet)
    with pytest.raises(DataError, match=r"plain\.xz: cannot be decompressed after line 0"):
        preprocess([write_lines(RECORDS, "plain.xz")], tmp_path / "out", IDS, log=quiet)


def test_faulty_arguments(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines(RECORDS)
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*workers=0.*log_interval=0.*json_keys=\['a', 'a'\]"):
        preprocess([source], tmp_path / "out", IDS, workers=0, log_interval=0, json_keys=("a", "a"))


def test_sentences() -> None:
    text = 'Dr. J. Smith met Mr. Li at 3.15 p.m. today. "Really?" he said. It was e.g. ok... He left!\n\nA title\n\nEnd'
    assert split_sentences(text) == [
        "Dr. J. Smith met Mr. Li at 3.15 p.m. today.",
        '"Really?" he said.',
        "It was e.g. ok...",
        "He left!",
        "A title",
        "End",
    ]
    assert split_sentences("One.\nTwo.  Three.", keep_newlines=True) == ["One.\n", "Two.", "Three."]
    assert split_sentences("\u4f60\u597d\u3002\u518d\u89c1\uff01") == ["\u4f60\u597d\u3002", "\u518d\u89c1\uff01"]
    assert split_sentences("  ") == []


def test_sentences_become_sequences(write_lines: WriteLines, tmp_path: Path) -> None:
    source = write_lines([{"text": "1 2\n\n3"}, {"text": ""}, {"text": "4"}])
    (prefix,) = preprocess([source], tmp_path / "my-bert", IDS, split_sentences=True, append_eod=True, log=quiet)
    assert prefix == str(tmp_path / "my-bert_text_sentence")
    assert contents(prefix) == [[1, 2], [3, 100], [4, 100]]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 2, 2, 3]


def test_commands(write_lines: WriteLines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines([{"body": "the quick brown fox " * 9 + str(i)} for i in range(50)])
    model = tmp_path / "tokenizer.model"
    assert train_tokenizer_command(
        ["--input", str(source), "--json-key", "body", "--output", str(model), "--vocab-size", "300"]
    ) == 0  # fmt: skip
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer-model", str(model)]
    arguments += ["--tokenizer-type", "GPTSentencePieceTokenizer", "--append-eod", "--json-keys", "body"]
    assert preprocess_command(arguments) == 0
    dataset = IndexedDataset(tmp_path / "out_body_document")
    assert len(dataset) == 50
    assert all(s[-1] == 2 for s in dataset[:])
    assert "Processed 50 documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replace", "text"),
    [
        ({"--input": "none.jsonl"}, "error: none.jsonl: no such file; check --input"),
        (
            {"--tokenizer-type": "Llama3"},
            "error: 1 problem in the configuration: - tokenizer_type='Llama3': unknown type",
        ),
        ({"--json-key": "body"}, "line 1: has no key 'body', only 'text', 'title', 'other'"),
        ({"--workers": "0"}, "workers=0: must be at least 1"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(
    write_lines: WriteLines, tmp_path: Path, capsys: pytest.CaptureFixture[str], replace: dict[str, str], text: str
) -> None:
    options = {
        "--input": str(write_lines(RECORDS)),
        "--output-prefix": str(tmp_path / "out"),
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": "100",
        **replace,
    }
    assert preprocess_command([word for pair in options.items() for word in pair]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Opening")]
    errors = [line for line in errors if not line.startswith(("Time", "Estimate"))]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert text in errors[0]


def test_train_tokenizer_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", str(tmp_path / "no.txt"), "--output", str(tmp_path / "m.model"), "--vocab-size", "300"]
    assert train_tokenizer_command(arguments) == 2
    assert re.fullmatch(r"error: .*no\.txt: no such file; check --input\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", [preprocess_command, train_tokenizer_command])
def test_help(command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(["--help"])
    assert caught.value.code == 0
    assert "example:" in capsys.readouterr().out

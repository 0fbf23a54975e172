"""Preprocessing in parts, killed runs, broken lines that are left out, and estimates of the output."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import zstandard
from patience import PATIENCE

from lightning_megatron.data import DataError, IndexedDataset
from lightning_megatron.data.preprocessing import parts
from lightning_megatron.data.preprocessing.encode import EncodeOptions, Encoder
from lightning_megatron.data.preprocessing.estimate import estimate
from lightning_megatron.data.preprocessing.parts import cut
from lightning_megatron.data.preprocessing.preprocess import TokenizerSpec, preprocess
from lightning_megatron.data.preprocessing.textfiles import LineReader, Source
from lightning_megatron.errors import ConfigError
from lightning_megatron.files import free_space
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli.data.preprocess import preprocess_command

IDS = TokenizerSpec("NullTokenizer", vocab_size=100)
LINES = [json.dumps({"text": " ".join(str(n % 100) for n in range(i % 40)), "title": f"{i % 7}"}) for i in range(300)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def output(folder: Path, name: str) -> dict[str, bytes]:
    found = {path.name.removeprefix(name): path.read_bytes() for path in folder.glob(f"{name}_*")}
    assert len(found) in (3, 6)
    return found


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_parts_are_all_lines_in_order_and_each_is_read_once(tmp_path: Path, count: int) -> None:
    files = [write(tmp_path / name, LINES[a:b]) for name, a, b in (("a", 0, 10), ("b", 10, 250), ("c", 250, 300))]
    with gzip.open(tmp_path / "d.gz", "wt") as packed:
        packed.write("{}\n" * 9)
    found = cut([*files, tmp_path / "d.gz"], count)
    assert len(found) == count if count < 64 else 40 < len(found) <= 64
    read = [line.decode().strip() for part in found for source in part for _, line in LineReader(source)]
    assert read == [*LINES, *["{}"] * 9]
    sizes = [sum(source.size for source in part) for part in found]
    assert max(sizes) < sum(sizes) / count + 200


@pytest.mark.slow
def test_partitions_do_not_change_a_byte(tmp_path: Path) -> None:
    sources = [write(tmp_path / "a.jsonl", LINES), tmp_path / "b.jsonl.gz"]
    with gzip.open(sources[1], "wt") as packed:
        packed.write("\n".join(LINES[::-1]))
    said: list[str] = []
    for name, options in {"one": {}, "some": {"partitions": 3, "workers": 2}}.items():
        preprocess(
            sources, tmp_path / name, IDS, json_keys=("text", "title"), append_eod=True, log=said.append, **options
        )
    assert output(tmp_path, "one") == output(tmp_path, "some")
    assert not (tmp_path / "some.parts").exists()
    assert any(line.startswith("Cut the input into ") for line in said)
    assert said[-3].startswith("Processed 600 documents")


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    source = write(tmp_path / "corpus.jsonl", LINES * 100)
    preprocess([source], tmp_path / "whole", IDS, log=lambda line: None)
    command = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out"), "--vocab-size", "100"]
    command += ["--tokenizer-type", "NullTokenizer", "--partitions", "20", "--workers", "2", "--log-interval", "1"]
    line = [sys.executable, "-m", "lightning_megatron.tools.cli.main", *command]
    job = subprocess.Popen(line, stderr=subprocess.PIPE, env=own_environment(OMP_NUM_THREADS="1"), text=True)
    assert job.stderr is not None
    assert any(line.startswith("Processed ") for line in job.stderr), "it ended before it was hit"
    job.send_signal(signal.SIGKILL)
    job.wait(PATIENCE)
    job.stderr.read()
    folder = tmp_path / "out.parts"
    left = {marker: marker.stat().st_mtime_ns for marker in folder.glob("part-*.json")}
    assert not list(tmp_path.glob("out_*")), "nothing under a final name"
    if not left:
        pytest.skip("no part was complete")
    again = subprocess.run(
        line, stderr=subprocess.PIPE, env=own_environment(OMP_NUM_THREADS="1"), text=True, check=True
    )
    assert f"Going on after {len(left)} of 20 parts" in again.stderr
    assert not folder.exists()
    assert output(tmp_path, "out") == output(tmp_path, "whole")


def test_what_another_run_has_left_is_not_taken(tmp_path: Path) -> None:
    source = write(tmp_path / "corpus.jsonl", LINES)
    folder = parts.PartsFolder(tmp_path / "out.parts", cut([source], 3), parts.EncodeOptions(IDS))
    folder.folder.mkdir()
    assert not folder.prepare()
    for part in folder.parts[:2]:
        parts.write_part(part, parts.EncodeOptions(IDS), parts.Encoder(parts.EncodeOptions(IDS)), lambda *so_far: None)
    assert folder.prepare()
    assert [part.done() is not None for part in folder.parts] == [True, True, False]
    for options, lines in ((parts.EncodeOptions(IDS, append_eod=True), LINES), (parts.EncodeOptions(IDS), LINES[1:])):
        write(source, lines)
        other = parts.PartsFolder(tmp_path / "out.parts", cut([source], 3), options)
        assert not other.prepare()
        assert not list(folder.folder.glob("part-*"))


@pytest.mark.parametrize("named", ["tokenizer.json", ""], ids=["the file", "its folder"])
@pytest.mark.parametrize("changed", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_parts_of_a_tokenizer_with_other_settings_are_not_taken(tmp_path: Path, named: str, changed: str) -> None:
    folder, source = tmp_path / "tokenizer", write(tmp_path / "corpus.jsonl", LINES)
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    options = parts.EncodeOptions(TokenizerSpec("HuggingFaceTokenizer", str(folder / named)))

    def goes_on() -> bool:
        made = parts.PartsFolder(tmp_path / "out.parts", cut([source], 3), options)
        found = made.prepare()
        made.parts[0].marker.write_text("{}")
        return found

    (tmp_path / "out.parts").mkdir()
    assert [goes_on(), goes_on()] == [False, True]
    (folder / changed).write_text('{"other": 1}')
    assert [goes_on(), goes_on()] == [False, True]


def test_two_runs_do_not_write_the_same_parts(tmp_path: Path) -> None:
    source = write(tmp_path / "corpus.jsonl", LINES)
    (tmp_path / "out.parts").mkdir()
    with parts_held(tmp_path / "out.parts"), pytest.raises(DataError, match=r"out\.parts: another run is writing"):
        preprocess([source], tmp_path / "out", IDS, partitions=2, log=lambda line: None)


def parts_held(folder: Path) -> Any:
    from lightning_megatron.files.holding import holding

    return holding(folder / "lock")


BROKEN = [
    "{",
    "[]",
    '{"text": 5}',
    '{"body": "1"}',
    '{"text": "1 x"}',
    '{"text": "\\ud800"}',
    "\x00",
    '{"text": "100"}',
]


@pytest.mark.parametrize("partitions", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_broken_lines_are_left_out_counted_and_named(tmp_path: Path, partitions: int) -> None:
    lines = [line for good, bad in zip(LINES, BROKEN * 30, strict=False) for line in (good, bad)]
    source, sound = write(tmp_path / "corpus.jsonl", lines), write(tmp_path / "sound.jsonl", LINES[:240])
    said: list[str] = []
    preprocess([source], tmp_path / "out", IDS, log=said.append, partitions=partitions)
    preprocess([sound], tmp_path / "sound", IDS, log=lambda line: None)
    assert output(tmp_path, "out") == output(tmp_path, "sound")
    told = [line for line in said if line.startswith("Left out")]
    assert told[-1] == "Left out 240 broken lines in all (--strict stops at the first one)"
    assert [line.split(": ")[1] for line in told[:-1]] == [f"{source}, line {n}" for n in (2, 4, 6, 8, 10)]
    assert "not JSON" in told[0]


def test_strict_names_the_line_in_a_range_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", ["{}"] * 5 + [""] + ["{}"] * 4)
    (part,) = cut([path], 2)[1]
    assert part.start
    numbers = [number for number, _ in LineReader(part)]
    assert [str(part.at(n, "x")).split(": ")[0] for n in numbers] == [f"{path}, line {n}" for n in range(7, 11)][
        -len(numbers) :
    ]


def test_input_without_a_document_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "corpus.jsonl", ['{"body": "1"}'] * 100_000)
    command = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer"]
    assert preprocess_command([*command, "--vocab-size", "100"]) == 2
    text = capsys.readouterr().err
    assert "none of the first lines is a document:" in text
    assert "line 1: has no key 'text', only 'body'; name the key of the text with --json-keys" in text


@pytest.mark.parametrize("files", [3, 8, 9, 40])
def test_an_estimate_from_some_files_is_of_all(tmp_path: Path, files: int) -> None:
    """Eight files at most are read; equal files make the estimate exact."""
    sources = [Source(write(tmp_path / f"{number}.jsonl", LINES[:10])) for number in range(files)]
    encoder = Encoder(EncodeOptions(IDS, ("text",)))
    expected = estimate(sources, encoder, 1 << 20)
    assert (expected.documents, expected.tokens) == (10 * files, sum(range(10)) * files)


@pytest.mark.parametrize("packed", [(), (3,), (4,), (0, 5, 9), tuple(range(10))], ids=str)
@pytest.mark.parametrize("keys", [("text",), ("text", "title")], ids=str)
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_bytes_of_an_estimate_are_those_of_the_pairs(tmp_path: Path, packed: Any, keys: Any, equal: bool) -> None:
    """Ten files, some of them compressed; beside its documents a pair has 42 bytes."""
    same = [LINES[39], LINES[38], LINES[37]]
    files = [write(tmp_path / f"{n}.jsonl", same * (20 if equal else 5 * (n + 1))) for n in range(10)]
    for number in packed:
        with gzip.open(f"{files[number]}.gz", "wb") as stream:
            stream.write(files[number].read_bytes())
        files[number] = Path(f"{files[number]}.gz")
    expected = estimate([Source(file) for file in files], Encoder(EncodeOptions(IDS, keys)), 1 << 20)
    preprocess(files, tmp_path / "out", IDS, json_keys=keys, log=lambda line: None)
    written = sum(path.stat().st_size for path in tmp_path.glob("out_*") if path.suffix in (".bin", ".idx"))
    rel = 0.1 if len(packed) == 10 and not equal else 0.05  # a short file is compressed less than a long one
    assert expected.size == pytest.approx(written, rel=rel)


def test_the_estimate_and_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LINES * 40
    plain, packed = write(tmp_path / "a.jsonl", lines), tmp_path / "b.jsonl.zst"
    packed.write_bytes(zstandard.compress(("\n".join(lines) + "\n").encode()))
    said: list[str] = []
    preprocess([plain, packed], tmp_path / "out", IDS, log=said.append)
    documents, tokens = (
        int(word.replace(",", "")) for word in said[0].split() if word[0].isdigit() and "." not in word
    )
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert documents == pytest.approx(len(dataset.document_indices) - 1, rel=0.2)
    assert tokens == pytest.approx(len(dataset.tokens), rel=0.2)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10**5))
    reason = rf"{tmp_path}: the output will take about \d\.\d MB, and 0\.1 MB are free; free some"
    with pytest.raises(DataError, match=reason):
        preprocess([plain], tmp_path / "full", IDS, log=said.append)
    assert not list(tmp_path.glob("full*"))
    preprocess([plain], tmp_path / "full", IDS, log=said.append, check_space=False)


def test_a_zst_file_that_is_cut_off_is_no_shorter_corpus(tmp_path: Path) -> None:
    whole = zstandard.compress("\n".join(LINES * 20).encode())
    for content, fault in (
        (whole[:-1], "in the middle of a frame"),
        (whole[: len(whole) // 2], "middle"),
        (b"", "no doc"),
    ):
        (tmp_path / "c.jsonl.zst").write_bytes(content)
        with pytest.raises(DataError, match=rf"c\.jsonl\.zst: .*{fault}"):
            preprocess([tmp_path / "c.jsonl.zst"], tmp_path / "out", IDS, log=lambda line: None)
    (tmp_path / "c.jsonl.zst").write_bytes(whole + zstandard.compress(b"\n" + LINES[0].encode()))
    (prefix,) = preprocess([tmp_path / "c.jsonl.zst"], tmp_path / "out", IDS, log=lambda line: None)
    assert len(IndexedDataset(prefix).document_indices) == 6002, "frames one after the other are one text"


def test_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return self.is_terminal

    source = write(tmp_path / "corpus.jsonl", LINES)
    for is_terminal in (False, True):
        Terminal.is_terminal = is_terminal
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        preprocess([source], tmp_path / "out", IDS, log_interval=100)
        text = stream.getvalue()
        assert ("100%" in text) == is_terminal
        assert text.count("Processed ") == (1 if is_terminal else 3)
        assert "Wrote " in text


def test_faulty_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="partitions=0: must be at least 1"):
        preprocess([write(tmp_path / "c", LINES)], tmp_path / "out", IDS, partitions=0)


def test_sources_of_no_bytes(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert Source(tmp_path / "empty").size == 0
    assert len(cut([write(tmp_path / "a", LINES), tmp_path / "empty"], 2)) == 2
    shutil.rmtree(tmp_path)

"""``lightning-megatron evaluate``: its numbers in several processes, its lines, and what it says to mistakes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli import main as command_line
from tests.evaluated import POSITIONS, Home, loss_sum, make_home

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return make_home(tmp_path_factory.mktemp("evaluate"), ("gpt2",))


def main(words: list[str]) -> int:
    """Run the command line in this process, and leave the environment as it was."""
    with patch.dict(os.environ):
        return command_line.main(words)


def words(home: Home, *more: str) -> list[str]:
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(home.hf("gpt2"))]
    return ["evaluate", "--checkpoint", str(home.checkpoint("gpt2")), *tokenizer, "--device", "cpu", *more]


def inputs(home: Home) -> list[str]:
    return ["--input", str(home.documents), str(home.wiki), "--json-keys", "text"]


def test_numbers_of_each_file(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": home.texts[4]}) + "\n")
    files = ["--input", str(home.documents), "--input", str(other), "--overlapping-eval", "8"]
    assert main(words(home, *files, "--json")) == 0
    found = json.loads(capsys.readouterr().out)["files"]
    assert list(found) == [str(home.documents), str(other)]
    total, count = loss_sum(home.model("gpt2"), home.encode(home.texts[4]), POSITIONS, 8)
    mine = found[str(other)]
    assert (mine["texts"], mine["tokens"], mine["num_bytes"]) == (1, count, len(home.texts[4]))
    assert mine["loss"] == pytest.approx(total / count, rel=1e-5)
    assert mine["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert mine["bits_per_byte"] == pytest.approx(total / math.log(2) / len(home.texts[4]), rel=1e-5)
    assert mine["word_perplexity"] == pytest.approx(math.exp(total / (len(home.texts[4].split()) - 1)), rel=1e-4)
    assert main(words(home, *files)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{home.documents}: ")
    assert second == (
        f"{other}: {count} tokens, loss {mine['loss']:.6f}, perplexity {mine['perplexity']:.6g}, "
        f"{mine['bits_per_byte']:.6f} bits per byte; by words (x {mine['token_ratio']:.4f}) "
        f"{mine['word_perplexity']:.6g}"
    )


def test_passages(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    lambada = ["--input", str(home.passages), "--format", "lambada", "--strict-lambada"]
    assert main(words(home, *lambada)) == 0
    assert " of 11 passages right, accuracy 0." in capsys.readouterr().out


@pytest.mark.slow
def test_processes_that_it_starts_give_the_same_numbers(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--input", str(home.documents), "--json"]
    assert main(words(home, *files)) == 0
    alone = json.loads(capsys.readouterr().out)["files"][str(home.documents)]
    script = str(Path(sys.executable).with_name("lightning-megatron"))
    result = subprocess.run(
        [script, *words(home, *files, "--pp", "2")],
        env=own_environment(),
        timeout=900,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said = "\n".join(line for line in result.stdout.splitlines() if not line.startswith("[Gloo]"))  # torch 2.10's
    together = json.loads(said)["files"][str(home.documents)]
    assert together == {name: pytest.approx(value, rel=1e-5) for name, value in alone.items()}


def broken(home: Home, folder: Path) -> list[str]:
    path = folder / "broken.jsonl"
    path.write_text('{"text": "a b c"}\n{"text": \n')
    return ["--input", str(path)]


def bert(home: Home, folder: Path) -> list[str]:
    (folder / "bert").mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    (folder / "bert" / "model.safetensors").touch()
    return [*inputs(home), "--checkpoint", str(folder / "bert")]


MISTAKES: dict[str, tuple[Callable[[Home, Path], list[str]], str]] = {
    "nothing to do": (lambda home, _: [], "--input=None: name files, or tasks with --lm-eval"),
    "no such file": (lambda home, folder: ["--input", str(folder / "none")], "none: no such file; check --input"),
    "a broken line": (broken, "broken.jsonl, line 2: not JSON"),
    "too long": (
        lambda home, _: [*inputs(home), "--seq-length", "64"],
        "--seq-length=64: the model knows 32 positions; nearest valid: 32",
    ),
    "left out": (
        lambda home, _: [*inputs(home), "--overlapping-eval", "33", "--limit", "0"],
        "--overlapping-eval=33: windows of 32 tokens that are shifted by more leave some out; nearest valid: 32",
    ),
    "every fault": (
        lambda home, _: [*inputs(home), "--overlapping-eval", "33", "--limit", "0"],
        "--limit=0: must be at least 1; nearest valid: 1",
    ),
    "a layout": (lambda home, _: ["--input", str(home.documents), "--tp", "3"], "tp=3"),
    "no decoder": (bert, "--checkpoint='BertModule': its model is no decoder; nearest valid: GPTModule"),
    "no checkpoint": (lambda home, folder: [*inputs(home), "--checkpoint", str(folder)], "error: "),
    "nothing to predict": (
        lambda home, folder: ["--input", str(one_token(folder))],
        "no text in it has two tokens; add --begin, or check --input",
    ),
}


def one_token(folder: Path) -> Path:
    path = folder / "short.jsonl"
    path.write_text('{"text": "a"}\n')
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    make, text = MISTAKES[mistake]
    assert main(words(home, *make(home, tmp_path))) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_lm_eval_is_asked_for_by_its_extra(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict(sys.modules, {"lm_eval": None}):
        assert main(words(home, "--lm-eval", "hellaswag")) == 2
    assert "pip install '.[eval]' in a clone of lightning-megatron" in capsys.readouterr().err

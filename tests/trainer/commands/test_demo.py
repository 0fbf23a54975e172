"""The demo, small: all of its parts, its last line, and what a second run does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

DEMO = Path(__file__).parents[3] / "examples" / "demo.py"
LAST_LINE = r"demo: val_loss (\d+\.\d+) -> (\d+\.\d+), \d+ tokens/s, checkpoint (\S+)"

pytestmark = pytest.mark.timeout(900)


def demo(where: Path) -> str:
    words = ["--directory", "made", "--steps", "10", "--vocab-size", "512", "--files", "12"]
    result = subprocess.run(
        [sys.executable, DEMO, *words],
        cwd=where,
        env=own_environment(),
        timeout=1100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    where = tmp_path_factory.mktemp("demo")
    return where, demo(where)


@pytest.mark.gate
def test_a_fresh_run_learns_and_ends_with_its_numbers(first: tuple[Path, str]) -> None:
    where, printed = first
    last = re.fullmatch(LAST_LINE, printed.splitlines()[-1])
    assert last, printed
    before, after, checkpoint = float(last[1]), float(last[2]), Path(last[3])
    assert before == pytest.approx(6.24, abs=0.1), "ln of the vocabulary"
    assert after < before
    assert not checkpoint.is_absolute()
    assert (where / checkpoint / "manifest.json").exists()
    assert (where / "made/run/loss.png").stat().st_size > 1000
    assert list(where.glob("made/run/tensorboard/*/events*"))
    assert "def __init__(self, " in printed, "the model continues a prompt"


@pytest.mark.exhaustive
def test_a_second_run_reuses_everything(first: tuple[Path, str]) -> None:
    where, printed = first
    again = demo(where)
    for name in ("corpus.jsonl", "tokenizer.model", "corpus_text_document.idx", "run"):
        assert f"reusing {Path('made') / name}" in again
    assert "making" not in again
    assert again.splitlines()[-1] == printed.splitlines()[-1]


@pytest.mark.exhaustive
def test_a_run_that_was_cut_off_goes_on(first: tuple[Path, str]) -> None:
    where, printed = first
    (where / "made/run/result.json").unlink()
    again = demo(where)
    assert "training goes on from made/run/checkpoints/last.ckpt" in again
    ours, theirs = (re.fullmatch(LAST_LINE, text.splitlines()[-1]) for text in (again, printed))
    assert ours is not None
    assert theirs is not None
    assert ours.groups() == theirs.groups()

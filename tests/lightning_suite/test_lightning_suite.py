"""A part of Lightning's own tests with our strategy in place of its own, where a checkout of them can be had."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import swapped_suite
from swapped_suite import KINDS, command, deadly, entries, keep, listed, main

CHECKOUT = os.environ.get("LIGHTNING_CHECKOUT")
PART = ("loops/optimization", "loops/test_training_loop.py", "models/test_hooks.py", "trainer/optimization")
ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.skipif(CHECKOUT is None, reason="LIGHTNING_CHECKOUT names no checkout of Lightning's repository")
def test_what_fails_with_our_strategy_alone_stands_on_the_list() -> None:
    assert main([str(Path(str(CHECKOUT)).absolute()), *PART]) == 0


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["reason"][:40])
def test_every_reason_has_its_tests_and_a_sentence(entry: dict[str, Any]) -> None:
    assert set(entry) - {"only", "left_out"} == {"reason", "note", "tests"}
    assert entry.get("only", "file") in KINDS
    assert entry["note"].endswith(".")
    assert len(set(entry["tests"])) == len(entry["tests"])
    assert all(test.startswith("tests_pytorch/") and test.count("::") == 1 for test in entry["tests"])


def test_entries_of_one_kind_of_checkpoint_count_for_it_alone() -> None:
    directories, files = (listed(kind) for kind in KINDS)
    test = "tests_pytorch/core/test_saving::test_load_from_checkpoint_strict"
    assert directories[test].startswith("checkpoints are directories")
    assert test not in files
    both = "tests_pytorch/trainer/optimization/test_backward_calls::test_backward_count_with_closure"
    assert directories[both] == files[both]


def test_one_file_is_a_flag_of_our_strategy_alone(tmp_path: Path) -> None:
    stock, directory, file = (command(tmp_path, ["core"], tmp_path / "report.xml", kind) for kind in (None, *KINDS))
    assert "swapped_strategy" not in stock
    assert [word for word in file if word not in directory] == ["--one-file"]
    assert [word for word in directory if word not in stock] == [
        "swapped_strategy",
        *(f"--deselect={test}" for test in deadly()),
    ]
    assert all(".py::" in test for test in deadly())


def test_a_folder_without_lightnings_tests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert f"{tmp_path} is no checkout of Lightning's repository" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_that_differs_stands_on_the_list_of_its_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests" / "tests_pytorch").mkdir(parents=True)
    of_files, unknown = "tests_pytorch/core/test_saving::test_load_from_checkpoint_strict", "tests_pytorch/a::test_b"
    monkeypatch.setattr(swapped_suite, "LAST_RUNS", tmp_path / "last-runs.yaml")
    found = {of_files + "[True]": "passed", unknown: "passed", "tests_pytorch/a::test_c": "passed"}

    def run(checkout: Path, paths: Any, kind: str | None) -> dict[str, str]:
        return found if kind is None else found | {of_files + "[True]": "failed"}

    monkeypatch.setattr(swapped_suite, "run", run)
    flags = ["--one-file"] if kind == "file" else []
    assert main([str(tmp_path), "--keep", *flags]) == (kind == "file")
    assert ("not on the list" in capsys.readouterr().out) == (kind == "file")
    kept = (tmp_path / "last-runs.yaml").read_text()
    assert f"{kind}:" in kept
    assert "differ: 1" in kept
    found.clear()  # nothing could be imported
    assert main([str(tmp_path), *flags]) == 1


def test_kept_counts_of_both_kinds_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapped_suite, "LAST_RUNS", tmp_path / "last-runs.yaml")
    for kind in KINDS:
        keep(kind, {"differ": 1})
    assert [line for line in (tmp_path / "last-runs.yaml").read_text().splitlines() if line.startswith(KINDS)] == [
        f"{kind}:" for kind in KINDS
    ]


def test_the_target_takes_a_folder_and_flags() -> None:
    words = ["make", "-n", "-o", ".venv/ready", "lightning-suite", "LIGHTNING=/some where", "SUITE=--one-file core"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 'swapped_suite.py "/some where" --one-file core' in said

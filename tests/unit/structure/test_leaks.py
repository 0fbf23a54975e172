"""The guard of every test sees what is left behind, of each kind."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import leaks
import pytest


def test_what_is_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = leaks.look()
    assert leaks.left(before) == []
    monkeypatch.setenv("LEFT_BY_A_TEST", "1")
    monkeypatch.setenv("MASTER_PORT", "1234")  # a job's: put back without a word
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-by-a-test")
    thread.start()
    file = Path(tempfile.gettempdir(), "left-by-a-test")
    file.touch()
    try:
        assert leaks.left(before, patience=0.0) == [
            "thread left-by-a-test",
            "variable LEFT_BY_A_TEST=1",
            "file left-by-a-test",
        ]
    finally:
        file.unlink()
        stop.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found by Linux")
def test_processes_have_some_time_to_end() -> None:
    before = leaks.look()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert [text.split()[:2] for text in leaks.left(before, patience=0.0)] == [["process", str(child.pid)]]
        child.kill()
    with subprocess.Popen(["sleep", "0.2"]):
        assert leaks.left(before, patience=60.0) == []


def test_each_session_has_a_folder_for_temporary_files_of_its_own() -> None:
    assert Path(tempfile.gettempdir()).name.startswith("lm-tests-")
    assert os.environ["TMPDIR"] == tempfile.gettempdir()

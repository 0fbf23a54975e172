"""What the gate says of tests that fail once, twice, or cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest
import second_look

OPTIONS = ["-p", "xdist"]

STEADY = "def test_steady(): pass\n"
FAILS = "def test_fails(): assert 1 == 2\n"
WAVERS = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({}))
def test_wavers(number):
    been = pathlib.Path(f"been-{{number}}")
    was_here = been.exists()
    been.touch()
    assert was_here
"""
BROKEN_FIXTURE = """
import pytest

@pytest.fixture
def broken(): raise OSError("no disk")

def test_of_it(broken): pass
"""


@pytest.fixture(autouse=True)
def _only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins that are installed take a second of each session."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("tests", "status", "said"),
    [
        (STEADY, 0, ["1 passed", "second look: 0 failed twice, 0 unsteady"]),
        (STEADY + WAVERS.format(1), 0, ["0 failed twice, 1 unsteady", "unsteady test_some.py::test_wavers[0]"]),
        (WAVERS.format(2), 1, ["0 failed twice, 2 unsteady"]),
        (FAILS + WAVERS.format(1), 1, ["1 failed twice, 1 unsteady", "FAILED twice test_some.py::test_fails"]),
        (BROKEN_FIXTURE, 1, ["1 failed twice", "no disk"]),
        (WAVERS.format(3), 1, ["3 tests have failed, too many for a second look"]),
        ("import nothing_of_this_name\n", 2, ["nothing_of_this_name"]),
        ("", 5, ["no tests ran"]),
    ],
    ids=["steady", "one wavers", "two waver", "one fails", "fixture", "too many", "not collected", "no test"],
)
def test_what_fails_twice_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tests: str,
    status: int,
    said: list[str],
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(tests)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(second_look, "UNSTEADY", 1)
    monkeypatch.setattr(second_look, "FAILED", 2)
    assert second_look.judge(OPTIONS) == status
    output = capfd.readouterr().out
    for words in said:
        assert words in output
    assert not (tmp_path / ".pytest_cache").exists()


def test_processes_of_the_first_look_are_no_matter_to_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(STEADY + FAILS + WAVERS.format(1))
    monkeypatch.chdir(tmp_path)
    assert second_look.judge([*OPTIONS, "-n", "2", "--dist", "worksteal"]) == 1
    assert "1 failed twice, 1 unsteady" in capfd.readouterr().out

"""Errors that nothing catches, as Python prints them: the user's frames, and on one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

BEGIN = """
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.errors import ConfigError, Problem, problems_of
"""
LIBRARY = "def call(function, *args):\n    return function(*args)\n"


def printed(folder: Path, script: str) -> list[str]:
    """Lines that a script's error leaves, below ``Traceback``; a package named torch stands for a library."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch/__init__.py").write_text(LIBRARY)
    (folder / "script.py").write_text(BEGIN + script)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")], env=own_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return [line.strip() for line in done.stderr.splitlines() if set(line) - set(" ~^")]


def test_an_error_of_a_configuration_shows_the_line_of_the_script_alone(tmp_path: Path) -> None:
    head, place, line, *text = printed(tmp_path, "layout = ParallelLayout(tp=0)")
    assert head.startswith("Traceback")
    assert "script.py" in place
    assert line == "layout = ParallelLayout(tp=0)"
    assert text[0] == "lightning_megatron.errors.ConfigError: 1 problem in the configuration:"
    assert text[1].startswith("- tp=0")
    assert len(text) == 2
    handled = (
        "try:\n    raise KeyError\nexcept KeyError as error:\n    raise ConfigError([Problem('a', 1, 'b')]) from error"
    )
    assert len(printed(tmp_path, handled)) == 5


@pytest.mark.parametrize(
    ("raised", "frames"),
    [
        ('error("x")', ["<module>", "mine"]),  # between the user's
        ('call(int, "x")', ["<module>", "mine", "call"]),  # below them: a fault of the library's, or of its arguments
        ("call(ParallelLayout, 0)", ["<module>", "mine"]),  # an error of ours says everything
    ],
)
def test_frames_of_libraries_between_those_of_the_user_are_left_out(
    tmp_path: Path, raised: str, frames: list[str]
) -> None:
    script = f"""
from torch import call
def error(text):
    raise ArithmeticError(text)
def mine():
    {raised.replace("error(", "raise ArithmeticError(")}
try:
    call(call, mine)
except Exception as error:
    error.is_printed_here = True
    raise
"""
    lines = printed(tmp_path, script)
    assert [line.rpartition("in ")[2] for line in lines if line.startswith("File")] == frames


def test_an_error_that_another_rank_prints_leaves_nothing_and_other_errors_are_as_always(tmp_path: Path) -> None:
    begin = "error = ArithmeticError('x')\nerror.is_printed_here = False\n"
    assert printed(tmp_path, f"{begin}raise error") == []
    assert printed(tmp_path, f"{begin}raise KeyError('other')")[-1] == "KeyError: 'other'"
    caught = "from torch import call\nproblems_of(ParallelLayout, 0)\ncall(int, 'x')"
    assert len([line for line in printed(tmp_path, caught) if line.startswith("File")]) == 2


def test_an_error_that_is_made_or_caught_changes_nothing(tmp_path: Path) -> None:
    script = """
import sys
before = sys.excepthook
error = ConfigError([])
problems_of(ParallelLayout, 0)
assert sys.excepthook is before
assert vars(error).keys() == {"problems"}
raise KeyError("other")
"""
    assert printed(tmp_path, script)[-1] == "KeyError: 'other'"

"""No test is left out for good, and what a session leaves out is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from selection import ROOT, SLOW, Turn, account, features, lacking

pytest_plugins = ["pytester"]
TESTS = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(5))
def test_grid(number): pass

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass
"""


@pytest.mark.parametrize("parts", [1, 4, 7])
def test_every_exhaustive_test_is_run_in_exactly_one_turn(parts: int) -> None:
    tests = {f"tests/test_a.py::test[{number}]" for number in range(30)}
    ran = [tests - Turn(number, parts).others(tests) for number in range(parts)]
    assert sorted(test for part in ran for test in part) == sorted(tests)


def test_a_turn_begins_at_another_file() -> None:
    assert Turn.parse("7/4").part == 3
    assert Turn(7, 4).rotated(list("abcde")) == list("cdeab")
    assert Turn(7, 4).rotated([]) == []


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers =\n    slow:\n    exhaustive:\n")
    pytester.makeconftest("""
        import selection
        pytest_addoption = selection.add_options
        def pytest_configure(config): config.pluginmanager.register(selection.Selection(config), "selection")
    """)
    pytester.makepyfile(test_some=TESTS)
    return pytester


def test_a_session_ends_with_a_line_of_what_it_left_out(project: pytest.Pytester) -> None:
    done = project.runpytest_inprocess("-m", "not exhaustive")
    done.assert_outcomes(passed=2, deselected=5)
    done.stdout.fnmatch_lines(["left out: 5 exhaustive; `make test-all` runs all tests"])
    done = project.runpytest_inprocess("--turn", "6/2", "-v")
    done.assert_outcomes(passed=5, skipped=2)
    done.stdout.fnmatch_lines(
        ["*test_quick PASSED*", "*test_grid*", "*test_slow PASSED*", "left out: 2 of other turns; *"]
    )
    done = project.runpytest_inprocess("--budget", "0", "-v")
    done.stdout.fnmatch_lines(["*test_quick SKIPPED*", "*test_slow SKIPPED*", "*test_grid*"])
    done.stdout.fnmatch_lines(["left out: 7 beyond 0 minutes; *"])
    done = project.runpytest_inprocess("-k", "quick", "-m", "not slow")
    done.stdout.no_fnmatch_line("left out*")


def test_features_of_which_tests_were_left_out_are_named() -> None:
    entries = [
        {"feature": "a thing", "evidence": ["tests/a/"]},
        {"feature": "another", "evidence": ["tests/b.py", "tests/a/test_c.py"]},
        {"feature": "the last", "evidence": ["tests/d.py"]},
    ]
    ran = ["tests/a/test_c.py::test_1", "tests/a/test_d.py::test_1", "tests/d.py::test_1"]
    left_out = {"tests/a/test_d.py::test_2": "slow", "tests/b.py::test_1": "exhaustive"}
    assert list(lacking(entries, ran, left_out)) == [
        "a thing: 2 ran; left out: 1 slow",
        "another: 1 ran; left out: 1 exhaustive",
    ]
    assert account(left_out) == "left out: 1 exhaustive, 1 slow; `make test-all` runs all tests"


def test_the_job_that_merges_runs_what_every_feature_rests_on() -> None:
    """All of ``tests/``, with another part of the exhaustive ones for each commit."""
    root = Path(__file__).parents[3]
    job = (root / ".ci" / "run").read_text()
    assert "make test-all" in job
    assert "--turn" in job
    assert "--evidence" in job
    everything = (root / "Makefile").read_text().partition("\ntest-all:")[2].partition("\n\n")[0]
    assert " -m " not in everything.replace("python -m pytest", "")
    for entry in features():
        assert any(path.startswith("tests/") and path != "tests/cuda/" for path in entry["evidence"]), entry["feature"]


def test_every_listed_slow_test_is_still_there() -> None:
    for name in SLOW.read_text().splitlines():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name

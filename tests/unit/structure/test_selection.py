"""No test is left out for good, and what a session leaves out is said."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
from selection import KINDS, ROOT, SLOW, SLOW_ON_GAUDI, account, features, lacking, of_part, part

from lightning_megatron.machine.job_environment import own_environment

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
def test_every_test_is_in_exactly_one_part(parts: int) -> None:
    tests = {f"tests/test_a.py::test[{number}]": KINDS[number % 3] for number in range(30)}
    found = [of_part(tests, number, parts) for number in range(1, parts + 1)]
    assert sorted(test for each in found for test in each) == sorted(tests)
    for kind in KINDS:  # each part has its share of the long ones
        counts = [sum(tests[test] == kind for test in each) for each in found]
        assert max(counts) - min(counts) <= 1


def test_parts_are_numbered_from_one() -> None:
    assert part("2/4") == (2, 4)
    for wrong in ("0/4", "5/4", "4"):
        with pytest.raises(ValueError):  # noqa: PT011 - argparse words it
            part(wrong)


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
    done = project.runpytest_inprocess("--part", "2/2", "-v")
    done.assert_outcomes(passed=2, deselected=5)
    done.stdout.fnmatch_lines(["*test_grid*", "left out: 5 of other parts; *"])
    done = project.runpytest_inprocess("-v")
    done.stdout.fnmatch_lines(["*test_quick PASSED*", "*test_slow PASSED*", "*test_grid*"])
    done.stdout.no_fnmatch_line("left out*")
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


def test_the_gate_is_the_same_for_every_commit_and_leaves_out_what_test_all_has() -> None:
    job, targets = ((ROOT / path).read_text() for path in (".ci/run", "Makefile"))
    assert job.splitlines()[-1].split() == ["exec", "make", "--keep-going", "--jobs", "2", "lint", "types", "test"]
    assert not any(word in job for word in ("git", "date", "RANDOM"))
    gate, everything = (targets.partition(f"\n{name}: ")[2].partition("\n\n")[0] for name in ("test", "test-all"))
    assert re.findall('-m "(.*)"', gate) == ["gate or not (slow or exhaustive)", "not (slow or exhaustive)"]
    assert " -m " not in everything


def collected(words: list[str]) -> set[str]:
    """Files of tests that a session with these options runs."""
    alone = ["-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", "-qq", "--rootdir", str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *alone],
        cwd=ROOT,
        env=own_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.partition(": ")[0] for line in done.stdout.splitlines()}


@pytest.mark.gate
def test_the_gate_holds_every_feature(request: pytest.FixtureRequest) -> None:
    """On the CPU, or by a test that only a Gaudi has: of other tests, a Gaudi runs those that the CPU has run.

    Where the gate has none of a file or folder that is named, its entry says so.
    """
    recipe = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cpu, gaudi = (shlex.split(words) for words in re.findall(r"second_look\.py (.*?) \|\| status=1", recipe, re.DOTALL))
    marks, config = cpu[cpu.index("-m") + 1], request.config
    is_part = config.option.keyword or getattr(config.option, "lf", False) or config.args != config.getini("testpaths")
    if config.option.markexpr == marks and not is_part:
        found = {item.location[0] for item in request.session.items}  # this session is the gate's
    else:
        found = collected(["-m", marks])
    on_gaudi = [word for word in gaudi if not word.startswith("tests/")]
    found |= collected(
        [*(word for word in on_gaudi if word not in ("-n", "3", "--dist", "worksteal")), "tests/device/"]
    )
    for entry in features():
        is_held = any(file.startswith(tuple(entry["evidence"])) for file in found)
        assert is_held != ("target" in entry), entry["feature"]
        absent = [
            path for path in entry["evidence"] if path[:6] == "tests/" and not any(f.startswith(path) for f in found)
        ]
        assert entry.get("beyond", absent if "target" in entry else []) == absent, entry["feature"]


@pytest.mark.parametrize("names", [SLOW, SLOW_ON_GAUDI], ids=lambda path: path.stem)
def test_every_listed_slow_test_is_still_there(names: Any) -> None:
    for name in names.read_text().splitlines():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name

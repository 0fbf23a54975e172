"""Run Lightning's own tests twice, as they are and with our strategy, and hold the difference against a list.

    make lightning-suite LIGHTNING=CHECKOUT SUITE="[--one-file] [--keep] [PATH ...]"

``CHECKOUT`` is a checkout of Lightning's repository at the installed version (its packages on PyPI carry no tests),
``PATH`` a folder or file below its ``tests/tests_pytorch/``; without one, all of :data:`PATHS`. A test that passes as
it is and fails with ours must stand in ``differences.yaml`` under a reason; the exit status is 1 if one does not, or if
none passes as it is. With ``--keep`` the counts are kept in ``last-runs.yaml``, for docs/lightning-suite.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

HERE = Path(__file__).resolve().parent
LAST_RUNS = HERE / "last-runs.yaml"
PATHS = (
    "callbacks", "checkpointing", "core", "loggers", "loops", "models/test_amp.py", "models/test_cpu.py",
    "models/test_hooks.py", "models/test_hparams.py", "models/test_restore.py", "profilers", "test_cli.py",
    "trainer/connectors/test_callback_connector.py", "trainer/connectors/test_checkpoint_connector.py",
    "trainer/connectors/test_data_connector.py", "trainer/connectors/test_signal_connector.py", "trainer/flags",
    "trainer/logging_", "trainer/optimization", "trainer/properties", "trainer/test_config_validator.py",
    "trainer/test_dataloaders.py", "trainer/test_states.py", "trainer/test_trainer.py", "tuner", "utilities",
)  # fmt: skip
"""Tests of the Trainer that ask for no accelerator."""

KINDS = ("directory", "file")
"""What a checkpoint of ours is: the default, and with ``--one-file``."""


def entries() -> list[dict[str, Any]]:
    """The entries of ``differences.yaml``."""
    found: list[dict[str, Any]] = yaml.safe_load((HERE / "differences.yaml").read_text())
    return found


def deadly() -> list[str]:
    """Tests that end the process, which is pytest: those of entries that are left out."""
    names = [test.split("::") for entry in entries() if entry.get("left_out") for test in entry["tests"]]
    return [f"{path}.py::{name}" for path, name in names]


def listed(kind: str) -> dict[str, str]:
    """The reason under which each test (without its parameters) stands in the list.

    Args:
        kind: one of :data:`KINDS`.
    """
    of_kind = [entry for entry in entries() if entry.get("only", kind) == kind]
    return {test: entry["reason"] for entry in of_kind for test in entry["tests"]}


def command(checkout: Path, paths: Sequence[str], report: Path, kind: str | None) -> list[str]:
    """The command that runs the tests below ``paths``.

    Args:
        checkout: checkout of Lightning's repository.
        paths: folders and files of tests.
        report: JUnit report to write.
        kind: checkpoints of our strategy; ``None`` for Lightning's own strategy.
    """
    words = [sys.executable, "-m", "pytest", "-c", str(checkout / "pyproject.toml")]
    words += ["--rootdir", str(checkout / "tests"), "-o", "addopts=", "-p", "no:cacheprovider", "-q"]
    words += ["--tb=no", "--timeout=120", "--continue-on-collection-errors", f"--junitxml={report}"]
    if kind is not None:
        words += ["-p", "swapped_strategy", *(f"--deselect={test}" for test in deadly())]
        words += ["--one-file"] if kind == "file" else []
    return [*words, *(f"tests_pytorch/{path}" for path in paths)]


def outcomes(report: Path) -> dict[str, str]:
    """Each test of a JUnit report with ``"passed"``, ``"failed"`` or ``"skipped"``."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"] = outcome
    return found


def run(checkout: Path, paths: Sequence[str], kind: str | None) -> dict[str, str]:
    """Run the tests below ``paths``, with our strategy if there is a ``kind``."""
    tests = checkout / "tests"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        path = os.pathsep.join(
            [str(HERE), str(HERE.parents[1]), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        words, variables = command(checkout, paths, report, kind), os.environ | {"PYTHONPATH": path}
        subprocess.run(words, cwd=tests, env=variables, check=False, stdout=sys.stderr)
        return outcomes(report)


def without_parameters(test: str) -> str:
    """The name of a test function, whatever parameters it was called with."""
    return test.split("[")[0]


def differing(stock: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Tests that pass as they are and fail with ours."""
    return sorted(t for t in stock.keys() & ours.keys() if (stock[t], ours[t]) == ("passed", "failed"))


def keep(kind: str, found: dict[str, Any]) -> None:
    """Keep the counts of a run."""
    kept = yaml.safe_load(LAST_RUNS.read_text()) if LAST_RUNS.exists() else {}
    LAST_RUNS.write_text(yaml.safe_dump(kept | {kind: found}, sort_keys=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what differs, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--one-file", action="store_true", help="our checkpoints are single files, not directories")
    parser.add_argument("--keep", action="store_true", help="keep the counts for docs/lightning-suite.md")
    chosen = parser.parse_args(arguments)
    checkout, kind = chosen.checkout.absolute(), KINDS[chosen.one_file]
    if not (checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(f"{checkout} is no checkout of Lightning's repository: it has no tests/tests_pytorch")
    paths = chosen.paths or PATHS
    stock, ours = run(checkout, paths, None), run(checkout, paths, kind)
    counts = Counter((stock[test], ours[test]) for test in stock.keys() & ours.keys())
    differ, reasons = differing(stock, ours), listed(kind)
    by_reason = Counter(reasons.get(without_parameters(test), "NOT ON THE LIST") for test in differ)
    for (as_it_is, with_ours), count in sorted(counts.items()):
        print(f"{count:5}  {as_it_is} as it is, {with_ours} with ours")
    for reason, count in by_reason.most_common():
        print(f"{count:5}  {reason}")
    for test in differ:
        if without_parameters(test) not in reasons:
            print(f"not on the list: {test}")
    if chosen.keep:
        both = {"lightning": version("lightning"), "tests": len(stock), "passed": counts["passed", "passed"]}
        keep(kind, both | {"differ": len(differ), "reasons": dict(by_reason)})
    return 1 if "NOT ON THE LIST" in by_reason or "passed" not in stock.values() else 0


if __name__ == "__main__":
    raise SystemExit(main())

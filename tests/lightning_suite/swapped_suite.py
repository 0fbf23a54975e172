"""Run Lightning's own tests twice, as they are and with our strategy, and hold the difference against a list.

    python tests/lightning_suite/swapped_suite.py CHECKOUT [PATH ...]

``CHECKOUT`` is a checkout of Lightning's repository at the installed version (its packages on PyPI carry no tests),
``PATH`` a folder or file below its ``tests/tests_pytorch/``; without one, all of :data:`PATHS`. A test that passes as
it is and fails with ours must stand in ``differences.yaml`` under a reason; the exit status is 1 if one does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import yaml

HERE = Path(__file__).resolve().parent
PATHS = (
    "callbacks", "checkpointing", "core", "loggers", "loops", "models/test_amp.py", "models/test_cpu.py",
    "models/test_hooks.py", "models/test_hparams.py", "models/test_restore.py", "profilers", "test_cli.py",
    "trainer/connectors/test_callback_connector.py", "trainer/connectors/test_checkpoint_connector.py",
    "trainer/connectors/test_data_connector.py", "trainer/connectors/test_signal_connector.py", "trainer/flags",
    "trainer/logging_", "trainer/optimization", "trainer/properties", "trainer/test_config_validator.py",
    "trainer/test_dataloaders.py", "trainer/test_states.py", "trainer/test_trainer.py", "tuner", "utilities",
)  # fmt: skip
"""Tests of the Trainer that ask for no accelerator."""

DEADLY = "tests_pytorch/trainer/connectors/test_signal_connector.py::test_sigterm_handler_can_be_added"
"""Sends SIGTERM to itself in the first step, where ours ends the process, which is pytest."""


def outcomes(report: Path) -> dict[str, str]:
    """Each test of a JUnit report with ``"passed"``, ``"failed"`` or ``"skipped"``."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"] = outcome
    return found


def run(checkout: Path, paths: Sequence[str], *, swapped: bool) -> dict[str, str]:
    """Run the tests below ``paths``, with our strategy if ``swapped``."""
    tests = checkout / "tests"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-c", str(checkout / "pyproject.toml"), "--rootdir", str(tests)]
        command += ["-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-q", "--tb=no", "--timeout=120"]
        command += [*(["-p", "swapped_strategy", f"--deselect={DEADLY}"] if swapped else []), f"--junitxml={report}"]
        command += [f"tests_pytorch/{path}" for path in paths]
        path = os.pathsep.join(
            [str(HERE), str(HERE.parents[1]), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        subprocess.run(command, cwd=tests, env=os.environ | {"PYTHONPATH": path}, check=False, stdout=sys.stderr)
        return outcomes(report)


def without_parameters(test: str) -> str:
    """The name of a test function, whatever parameters it was called with."""
    return test.split("[")[0]


def listed() -> dict[str, str]:
    """The reason under which each test (without its parameters) stands in ``differences.yaml``."""
    entries = yaml.safe_load((HERE / "differences.yaml").read_text())
    return {test: entry["reason"] for entry in entries for test in entry["tests"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print what differs, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("paths", nargs="*", default=list(PATHS))
    chosen = parser.parse_args(arguments)
    stock = run(chosen.checkout, chosen.paths, swapped=False)
    ours = run(chosen.checkout, chosen.paths, swapped=True)
    both = stock.keys() & ours.keys()
    differ = sorted(test for test in both if (stock[test], ours[test]) == ("passed", "failed"))
    reasons = listed()
    by_reason = Counter(reasons.get(without_parameters(test), "NOT ON THE LIST") for test in differ)
    counts = Counter((stock[test], ours[test]) for test in both)
    for (as_it_is, with_ours), count in sorted(counts.items()):
        print(f"{count:5}  {as_it_is} as it is, {with_ours} with ours")
    for reason, count in by_reason.most_common():
        print(f"{count:5}  {reason}")
    unknown = [test for test in differ if without_parameters(test) not in reasons]
    for test in unknown:
        print(f"not on the list: {test}")
    return 1 if unknown else 0


if __name__ == "__main__":
    raise SystemExit(main())

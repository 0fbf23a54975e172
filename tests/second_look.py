"""Run pytest, and run what has failed once more: each test alone, in a process of its own. The gate's way to judge.

A test that passes then is unsteady: it is named, its first traceback stands above, and it does not fail the run. What
fails twice does; so do more unsteady tests than ``UNSTEADY``, more failures than ``FAILED``, and every other end of the
first run. There is no other retry anywhere.

Run: ``python tests/second_look.py OPTIONS``, options of pytest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

UNSTEADY = 3
FAILED = 20


def run(options: list[str], cache: str, *more: str) -> int:
    """Exit status of a session with its cache in a folder of its own."""
    command = [sys.executable, "-m", "pytest", *options, "-o", f"cache_dir={cache}", *more]
    return subprocess.run(command, check=False).returncode


def failed_in(cache: str) -> list[str]:
    """Tests that have failed or met an error in a session, in alphabetical order."""
    file = Path(cache, "v", "cache", "lastfailed")
    return sorted(json.loads(file.read_text())) if file.exists() else []


def passes_alone(options: list[str], test: str) -> bool:
    """Run one test without pytest-xdist."""
    with tempfile.TemporaryDirectory() as cache:
        file = Path(cache, "v", "cache", "lastfailed")
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({test: True}))
        return run(options, cache, "-n", "0", "--last-failed", "--last-failed-no-failures", "none") == 0


def judge(options: list[str]) -> int:
    """Exit status of the whole."""
    with tempfile.TemporaryDirectory() as cache:
        status = run(options, cache)
        failed = failed_in(cache)
    if status not in (0, 1) or (status == 1 and not failed):
        return status
    if len(failed) > FAILED:
        print(f"{len(failed)} tests have failed, too many for a second look")
        return status
    unsteady = [test for test in failed if passes_alone(options, test)]
    twice = [test for test in failed if test not in unsteady]
    print(f"\nsecond look: {len(twice)} failed twice, {len(unsteady)} unsteady")
    for test in twice:
        print(f"FAILED twice {test}")
    for test in unsteady:
        print(f"unsteady {test}")
    return int(bool(twice) or len(unsteady) > UNSTEADY)


if __name__ == "__main__":
    sys.exit(judge(sys.argv[1:]))

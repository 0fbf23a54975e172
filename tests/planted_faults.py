"""Plant faults in the package, one at a time, and run the tests that should find them: what survives is a hole.

Run: ``python tests/planted_faults.py [WORDS ...]`` tries all, or those whose name contains one of the words; a name
begins with its room. The faults stand in ``tests/planted/``, each with the test files of its room, of which only the
tests of the gate run. Each is planted in a copy of the repository. A fault of which no test fails is printed as
survived, and the exit status is 1. By hand: a fault costs as much as its tests, whose CPU seconds are printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A line that is wrong.

    Attributes:
        name: room and fault, in a few words.
        file: file below ``lightning_megatron``.
        before: text that stands there once.
        after: text in its place.
        tests: files or folders of tests of its room.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


def faults() -> list[Fault]:
    """All faults of ``tests/planted/*.yaml``."""
    files = sorted(Path(__file__).with_name("planted").glob("*.yaml"))
    return [Fault(**entry) for file in files for entry in yaml.safe_load(file.read_text())]


def finder_of(fault: Fault, copy: Path) -> str:
    """The first test of a fault's room that fails with it; empty if all pass."""
    file = copy / "lightning_megatron" / fault.file
    text = file.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} does not hold once: {fault.before}")
    file.write_text(text.replace(fault.before, fault.after))
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", "300"]
    words += ["-m", "gate or not (slow or exhaustive)"]
    command = [sys.executable, "-m", "pytest", *words, *fault.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    file.write_text(text)
    if done.returncode > 1:
        raise SystemExit(f"{fault.name}: pytest has ended with {done.returncode}\n{done.stdout[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return (failed[1] if failed else f"pytest ended with {done.returncode}") if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [fault for fault in faults() if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            copy.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        holes = 0
        for fault in chosen:
            before = os.times()
            finder, after = finder_of(fault, copy), os.times()
            holes += not finder
            seconds = after.children_user + after.children_system - before.children_user - before.children_system
            print(f"found by {finder}" if finder else "SURVIVED", f"({seconds:.0f} s):", fault.name, flush=True)
    print(f"{holes} of {len(chosen)} faults survived")
    return int(holes > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Plant faults in the package, one at a time, and run the tests that should find them: what survives is a hole.

Run: ``python tests/planted_faults.py [WORDS ...]`` tries all, or those whose name contains one of the words. Each is
planted in a copy of the repository; a fault of which no test fails is printed as survived, and the exit status is 1.
By hand: a fault costs as much as its tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """A line that is wrong.

    Attributes:
        name: the fault in a few words.
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


FAULTS = [
    Fault(
        "MegatronLR.step(epoch) without the step size",
        "optim/lr_schedule.py",
        "self.position = epoch * self._step_size",
        "self.position = epoch",
        "tests/unit/optim",
    ),
    Fault(
        "disk estimate of eight files for all",
        "data/preprocessing/estimate.py",
        "scale = sum(source.size for source in sources) / max(1, sum(source.size for source in chosen))",
        "scale = 1.0",
        "tests/unit/data/test_preprocess_at_scale.py",
    ),
    Fault(
        "no directory sync before the rename",
        "checkpoint/directory/atomic_dir.py",
        "    sync_directory(temporary)\n    if not",
        "    if not",
        "tests/unit/checkpoint/integrity",
    ),
    Fault(
        "pipeline stride without cp",
        "planning/time/communication.py",
        "layout.tp * layout.cp * layout.data_parallel_size",
        "layout.tp * layout.data_parallel_size",
        "tests/unit/planning/test_step_time.py",
    ),
    Fault(
        "scale lost in the merged adapter",
        "adapters/layers.py",
        "self._part(name).b @ self._part(name).a * self.scale",
        "self._part(name).b @ self._part(name).a",
        "tests/unit/adapters",
    ),
    Fault(
        "consumed tokens lost after a restart",
        "lightning/callbacks/megatron_log.py",
        'samples=state_dict["samples"], tokens=state_dict["tokens"]',
        'samples=state_dict["samples"]',
        "tests/trainer/callbacks/test_megatron_log.py",
    ),
]


def survives(fault: Fault, copy: Path) -> bool:
    """True if the tests of a fault's room pass with it."""
    file = copy / "lightning_megatron" / fault.file
    text = file.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} does not hold once: {fault.before}")
    file.write_text(text.replace(fault.before, fault.after))
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gate or not (slow or exhaustive)"]
    command = [sys.executable, "-m", "pytest", *words, *fault.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    file.write_text(text)
    if done.returncode > 1:
        raise SystemExit(f"{fault.name}: pytest has ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            copy.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        holes = 0
        for fault in chosen:
            survived = survives(fault, copy)
            holes += survived
            print("SURVIVED" if survived else "found", fault.name, flush=True)
    print(f"{holes} of {len(chosen)} faults survived")
    return int(holes > 0)


if __name__ == "__main__":
    sys.exit(main())

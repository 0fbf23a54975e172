"""Remains of a killed ``preprocess``: no process, and no file that the next run does not clear."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

from lightning_megatron.data import IndexedDataset, IndexedDatasetWriter
from lightning_megatron.machine.job_environment import own_environment

JOB = """
import sys
from lightning_megatron.tools.cli.main import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def test_what_a_dead_run_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    alive = IndexedDatasetWriter(tmp_path / "x", np.int32)
    alive.add_document([1, 2], [2])
    left = [tmp_path / f"x.{half}.tmp-4711" for half in ("bin", "idx")]
    for file in left:
        file.write_bytes(b"half")
    other = tmp_path / "xy.bin.tmp-4711"
    other.write_bytes(b"of another prefix")
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as second:
        second.add_document([3], [1])
        assert not any(file.exists() for file in left)
        assert len(list(tmp_path.glob("x.bin.tmp-*"))) == 2
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [3]
    alive.finalize()
    assert IndexedDataset(tmp_path / "x")[0].tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.crc", "x.idx", other.name]


def test_new_files_have_the_permissions_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
            writer.add_document([3], [1])
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def processes_of(group: int) -> list[int]:
    """Those of a session, by their id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_worker_and_no_half_a_pair_outlive_a_killed_run(tmp_path: Path, number: signal.Signals) -> None:
    words = " ".join(str(n % 90) for n in range(2000))
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": words}) for _ in range(2_000)))
    (tmp_path / "job.py").write_text(JOB)
    command = ["preprocess", "--input", "corpus.jsonl", "--output-prefix", "out", "--tokenizer-type", "NullTokenizer"]
    command += ["--vocab-size", "100", "--workers", "2", "--log-interval", "1"]
    job = subprocess.Popen(
        [sys.executable, "job.py", *command], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE,
        env=own_environment(OMP_NUM_THREADS="1"), text=True,
    )  # fmt: skip
    assert job.stderr is not None
    # Nobody reads on until the job is hit: it has more lines of progress to print than a pipe holds, and waits.
    assert any("Processed" in line for line in job.stderr), "it ended before it was hit"
    started = len(processes_of(job.pid))
    assert started >= 4  # with two workers and the tracker of semaphores
    if number == signal.SIGINT:
        os.killpg(job.pid, number)  # as Ctrl-C does
    else:
        job.send_signal(number)
    job.stderr.read()
    assert job.wait(PATIENCE) != 0
    deadline = time.monotonic() + PATIENCE
    while processes_of(job.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(job.pid)
    left = {path.name.partition(".tmp-")[0] for path in tmp_path.glob("out*")}
    assert left == ({"out_text_document.bin"} if number == signal.SIGKILL else set())
    assert not (tmp_path / "out_text_document.bin").exists()
    with IndexedDatasetWriter(tmp_path / "out_text_document", np.uint16) as writer:
        writer.add_document([1], [1])
    assert sorted(path.name for path in tmp_path.glob("out*")) == [
        "out_text_document.bin",
        "out_text_document.crc",
        "out_text_document.idx",
    ]

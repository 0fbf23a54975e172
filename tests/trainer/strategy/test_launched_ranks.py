"""Ranks that Lightning's launcher has started: none outlives a failed `fit`, not even one that is stopped.

Real processes, started by the launcher: this file is also the script that they run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.lightning.launch.children import Children
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.recorder.file_format import State
from lightning_megatron.recorder.reading import read_run, runs_below

TIMEOUT = 40
"""Seconds after which a collective that nobody answers fails; a busy machine takes that long to import torch."""


def job(how: str, victim: int, folder: Path) -> None:
    """Train on two processes; in the third batch something happens to one of them."""
    import lightning.pytorch as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_megatron import MegatronStrategy

    class Struck(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                (folder / f"pid-{self.global_rank}").write_text(str(os.getpid()))
            if batch_idx == 2 and self.global_rank == victim:
                (folder / "struck").write_text(str(time.time()))
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif how == "raise":
                    raise ArithmeticError("no luck")
                while True:
                    time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(timeout=timedelta(seconds=TIMEOUT)),
        default_root_dir=folder,
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Struck())


@contextmanager
def launched(how: str, victim: int, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The launching process, struck by now, and the file with what both ranks print."""
    output = folder / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, __file__, how, str(victim), str(folder)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=own_environment(OMP_NUM_THREADS="1"),
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 300
        while not (folder / "struck").exists():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < end, output.read_text()
            time.sleep(0.1)
        yield process, output
    finally:
        for number in (signal.SIGKILL, signal.SIGCONT):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait()


def is_there(folder: Path, rank: int) -> bool:
    try:
        stat = Path(f"/proc/{(folder / f'pid-{rank}').read_text()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("stop", 1),
        pytest.param("kill", 1, marks=pytest.mark.exhaustive),
        pytest.param("raise", 1, marks=pytest.mark.exhaustive),
        pytest.param("raise", 0, marks=pytest.mark.exhaustive),
        pytest.param("hang", 1, marks=pytest.mark.exhaustive),
        pytest.param("hang", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_a_failed_job_ends_in_time_names_the_rank_and_leaves_no_process(tmp_path: Path, how: str, victim: int) -> None:
    with launched(how, victim, tmp_path) as (process, output):
        code = process.wait(TIMEOUT + 30)  # on a busy machine Python itself may need 10 s to exit
        text = output.read_text()
        assert code != 0, text
        assert not is_there(tmp_path, 1), text
        states = {"stop": "stopped", "kill": "dead: killed by SIGKILL", "raise": "raised ArithmeticError", "hang": ""}
        assert re.search(rf"First to blame: rank {victim} .*{states[how]}.* in step 2, .*training step", text), text
        ends = [view.since / 1e9 for view in read_run(runs_below(tmp_path)[0]) if view.state != State.RUNNING]
        assert max(ends) - float((tmp_path / "struck").read_text()) < TIMEOUT + 5


@pytest.mark.exhaustive
def test_children_of_a_stopped_launcher_end_by_themselves_and_say_so(tmp_path: Path) -> None:
    with launched("stop", 0, tmp_path) as (process, output):
        end = time.monotonic() + TIMEOUT + 8
        while is_there(tmp_path, 1) and time.monotonic() < end:
            time.sleep(0.1)
        text = output.read_text()
        assert not is_there(tmp_path, 1), text
        assert process.poll() is None
        assert re.search(r"First to blame: rank 0 .*stopped", text), text


def test_failed_children_have_their_global_ranks() -> None:
    """The launching process is rank 4 here; its children follow it."""
    waits = "import sys; sys.stdin.read(); sys.exit({})"
    statuses = (0, 3, 5)
    command = [sys.executable, "-S", "-c"]
    processes = [subprocess.Popen([*command, waits.format(s)], stdin=subprocess.PIPE) for s in statuses]
    children = Children(processes, first_rank=4)
    children.let_end()  # else a failure would end this process, too
    for process in processes:
        process.communicate()
    assert children.failed == {6: 3, 7: 5}


def test_children_that_do_not_end_by_themselves_are_ended_stopped_ones_too() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.exit(0)"]),
        subprocess.Popen([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE),
        subprocess.Popen(["sleep", "600"]),
    ]
    assert processes[1].stdout is not None
    processes[1].stdout.readline()
    processes[2].send_signal(signal.SIGSTOP)
    processes[0].wait()
    children = Children(processes, first_rank=4)
    assert children.end(grace=0.1) == [6, 7]
    assert [process.poll() for process in processes] == [0, -signal.SIGKILL, -signal.SIGKILL]


if __name__ == "__main__":
    job(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

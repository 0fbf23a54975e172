"""Processes of a job end, with a status that a launcher sees, although the bridge waits for all members of its groups.

Real processes: this file is also the script that they run, by Lightning's launcher or by torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing.ports import free_port

PATIENCE = 240.0
"""Seconds for any event, as in ``tests/patience.py``, which this file does not find where it is a script."""
EXIT_SECONDS = PATIENCE
"""Seconds that the simulated bridge waits at the end of a process, instead of for ever."""
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def job(how: str, victim: int, recorded: bool, folder: str) -> None:
    """Train on two ranks; something happens to one of them in the third batch, or after training."""
    import lightning.pytorch as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_megatron import MegatronHPUStrategy

    class Struck(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and self.global_rank == victim and how == "raise":
                raise ArithmeticError("no luck")
            if batch_idx == 2 and how == "both raise":
                raise ArithmeticError("no luck")
            if batch_idx == 2 and self.global_rank == victim and how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="hpu",
        devices=2,
        strategy=MegatronHPUStrategy(timeout=timedelta(minutes=10), record_actions=recorded),
        default_root_dir=folder,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Struck()
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    if how == "after training" and trainer.global_rank == victim:
        raise ArithmeticError("no luck")
    if how == "slow end" and trainer.global_rank == victim:
        time.sleep(3)
    print(f"rank {trainer.global_rank} has come to its end", flush=True)


def outcome(launcher: str, how: str, victim: int, recorded: bool, folder: Path) -> tuple[int, float, str]:
    """Exit status, seconds and output of a job."""
    begun = time.monotonic()
    more = {"OMP_NUM_THREADS": "1", "LIGHTNING_MEGATRON_HPU_SIM_EXIT_SECONDS": str(EXIT_SECONDS)}
    done = subprocess.run(
        [*LAUNCHERS[launcher], __file__, how, str(victim), str(int(recorded)), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        env=own_environment(**more),
        cwd=folder,
        check=False,
    )
    return done.returncode, time.monotonic() - begun, done.stdout


SLOW = pytest.mark.slow


@pytest.mark.parametrize("launcher", ["lightning", pytest.param("torchrun", marks=SLOW)])
@pytest.mark.parametrize(
    ("how", "victim", "recorded"),
    [
        ("raise", 1, False),
        pytest.param("raise", 0, True, marks=SLOW),
        pytest.param("after training", 1, True, marks=SLOW),
        pytest.param("both raise", 0, False, marks=SLOW),
    ],
)
def test_a_failed_rank_ends_the_job(launcher: str, how: str, victim: int, recorded: bool, tmp_path: Path) -> None:
    code, _, output = outcome(launcher, how, victim, recorded, tmp_path)
    assert code != 0, output
    assert "ArithmeticError: no luck" in output
    assert "wait here for ever" not in output, output
    # With a record, the other rank's watch may be first to see it, and torchrun then ends both.
    assert recorded or "this process ends at once" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
@pytest.mark.parametrize(("how", "victim"), [("nothing", 0), ("slow end", 0), ("slow end", 1)])
def test_a_job_without_a_fault_ends_in_order(launcher: str, how: str, victim: int, tmp_path: Path) -> None:
    code, _, output = outcome(launcher, how, victim, True, tmp_path)
    assert code == 0, output
    assert output.count("has come to its end") == 2, output
    assert "ends at once" not in output, output
    assert "for ever" not in output, output
    assert "cards of the ranks: rank 0: 0, 0; rank 1: 1, 1 (ID, HLS_MODULE_ID)" in output, output
    assert output.count("(2 ranks): the first collective took") == 1, output


def alone() -> None:
    """Without our strategy: rank 1 raises behind its collective, and rank 0 waits for it in another one."""
    import habana_frameworks.torch.distributed.hccl  # noqa: F401
    import torch.distributed as dist

    dist.init_process_group("hccl", timeout=timedelta(minutes=10))
    dist.all_reduce(torch.ones(1, device="hpu"))
    if dist.get_rank() == 1:
        raise ArithmeticError("no luck")
    dist.all_reduce(torch.ones(1, device="hpu"))


def test_the_simulated_bridge_keeps_a_process_that_fails() -> None:
    """What the tests above are about: without the end that we give it, such a process hangs on a Gaudi."""
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = own_environment(**place, LIGHTNING_MEGATRON_HPU_SIM_EXIT_SECONDS="2")
        command = [sys.executable, __file__, "alone"]
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        _, errors = ranks[1].communicate(timeout=PATIENCE)
        assert ranks[1].returncode == 86, errors
        assert "no luck" in errors
        assert "wait here for ever" in errors
    finally:
        ranks[0].kill()
        ranks[0].communicate()


def test_a_failed_process_of_a_calibration_ends_at_once(tmp_path: Path) -> None:
    env = own_environment(LIGHTNING_MEGATRON_HPU_SIM_EXIT_SECONDS="2")
    command = [sys.executable, "-m", "lightning_megatron.tools.calibration.worker"]
    ranks = []
    for rank, seconds in (("0", "0"), ("1", "no number")):
        words = [*command, rank, "2", "hpu", str(tmp_path), seconds]
        ranks.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
    try:
        _, errors = ranks[1].communicate(timeout=PATIENCE)
        assert ranks[1].returncode == 1, errors
        assert errors.splitlines()[-1] == "ValueError: could not convert string to float: 'no number'"
    finally:
        ranks[0].kill()
        ranks[0].communicate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_that_leave_after_a_signal_end_in_order(victim: int, tmp_path: Path) -> None:
    code, _, output = outcome("lightning", "signal", victim, True, tmp_path)
    assert code == 128 + signal.SIGTERM, output
    assert "ends at once" not in output, output
    assert "for ever" not in output, output


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone()
    else:
        job(sys.argv[1], int(sys.argv[2]), bool(int(sys.argv[3])), sys.argv[4])

"""Each rank of a machine computes on its share of the cores, unless the user gives a number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from socket import socket

import pytest
import torch

from lightning_megatron.lightning.launch.launcher import share_cores
from lightning_megatron.machine.job_environment import own_environment

CORES, SHARE, NUMBER = 2, 1, 5
"""Cores of a machine, those of one of two ranks, and a number of threads that nobody would choose."""
MACHINE = f"""
import os, torch
os.sched_getaffinity = lambda _: set(range({CORES}))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads({CORES})  # as torch does by itself there
"""
SCRIPT = """
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from lightning_megatron import MegatronStrategy

class Threads(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([float(torch.get_num_threads())])

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        Path(f"rank-{self.global_rank}").write_text(f"{torch.get_num_threads()}, workers: {int(batch[0])}")
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    trainer = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(), max_steps=1, logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), DataLoader(Threads(), num_workers=1))
"""


def threads_of_ranks(folder: Path, variables: list[dict[str, str]], *words: str, before: str = "") -> list[str]:
    """Threads of each rank and of its loader's workers, on a machine of ``CORES`` cores.

    Args:
        folder: folder of the job.
        variables: environments; a process is started for each.
        words: what starts the script.
        before: what the script does first.
    """
    script = folder / "job.py"
    script.write_text(MACHINE + before + SCRIPT)
    environment = {name: value for name, value in own_environment().items() if name != "OMP_NUM_THREADS"}
    jobs = [
        subprocess.Popen(
            [sys.executable, *words, str(script)],
            cwd=folder,
            env=environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for more in variables
    ]
    text = "".join([job.communicate(timeout=300)[0] for job in jobs])
    assert not any(job.returncode for job in jobs), text
    return [(folder / f"rank-{rank}").read_text() for rank in range(2)]


def ranks_with(number: int) -> list[str]:
    return [f"{number}, workers: 1"] * 2


@pytest.mark.slow
@pytest.mark.gate
def test_launched_ranks_share_the_cores(tmp_path: Path) -> None:
    assert threads_of_ranks(tmp_path, [{}]) == ranks_with(SHARE)


@pytest.mark.slow
def test_tasks_of_slurm_share_the_cores(tmp_path: Path) -> None:
    with socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    job |= {"SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    tasks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    assert threads_of_ranks(tmp_path, tasks) == ranks_with(SHARE)


@pytest.mark.slow
def test_torchrun_gives_the_number(tmp_path: Path) -> None:
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    assert threads_of_ranks(tmp_path, [{}], *words) == ranks_with(1)


@pytest.mark.slow
def test_a_variable_is_obeyed(tmp_path: Path) -> None:
    variable = {"OMP_NUM_THREADS": str(CORES)}
    words = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]  # fewer on a machine of one core
    torchs = subprocess.run(words, env=own_environment(**variable), capture_output=True, text=True, check=True).stdout
    assert threads_of_ranks(tmp_path, [variable]) == ranks_with(int(torchs))


@pytest.mark.slow
def test_a_call_is_obeyed(tmp_path: Path) -> None:
    call = f"torch.set_num_threads({NUMBER})\n"
    assert threads_of_ranks(tmp_path, [{}], before=call) == ranks_with(NUMBER)


@pytest.fixture
def all_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is given back
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("all_cores")
def test_a_process_has_at_least_one_thread() -> None:
    share_cores(CORES + 1)
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")


@pytest.mark.usefixtures("all_cores")
def test_the_only_process_of_a_machine_keeps_all_cores() -> None:
    share_cores(1)
    assert torch.get_num_threads() == CORES


@pytest.mark.usefixtures("all_cores")
def test_a_number_that_was_set_stays_and_is_handed_on() -> None:
    torch.set_num_threads(NUMBER)
    share_cores(2)
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (NUMBER, str(NUMBER))

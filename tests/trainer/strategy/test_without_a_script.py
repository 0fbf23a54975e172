"""Notebooks, ``python -i``, ``python -c`` and programs from stdin: one process trains, several are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

PROGRAM = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_megatron import MegatronStrategy
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(accelerator="cpu", devices={devices}, strategy=MegatronStrategy(), max_steps=1, **quiet)
trainer.fit(BoringModel())
print("trained", trainer.global_step)
"""


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        ("-c", 2),
        ("-i", 1),
        pytest.param("-", 2, marks=pytest.mark.slow),
        pytest.param("-i", 2, marks=pytest.mark.slow),
        pytest.param("-c", 1, marks=pytest.mark.slow),
        pytest.param("-", 1, marks=pytest.mark.slow),
    ],
)
def test_one_process_trains_and_several_are_told_to_write_a_script(tmp_path: Path, how: str, devices: int) -> None:
    program = PROGRAM.format(devices=devices)
    done = subprocess.run(
        [sys.executable, how, *([program] if how == "-c" else [])],
        input="" if how == "-c" else program,
        cwd=tmp_path,
        env=own_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = done.stdout + done.stderr
    if devices == 1:
        assert "trained 1" in done.stdout, said
        return
    assert "trained 1" not in done.stdout, said
    where = "a notebook or an interactive session" if how == "-i" else "python -c, or a program from stdin,"
    assert f"devices=2: each process runs the script, and {where} has none" in said
    assert "torchrun --nproc-per-node 2 train.py" in said
    assert "ddp_notebook" not in said
    assert done.returncode == (0 if how == "-i" else 1)  # a session goes on

"""A job of one machine is found by no other machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

psutil = pytest.importorskip("psutil")

SCRIPT = """
import psutil, torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_megatron import MegatronStrategy

class Look(Callback):
    def on_train_start(self, trainer, module):
        found = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        everyone = [None, None]
        dist.all_gather_object(everyone, found)
        if trainer.is_global_zero:
            print("LISTENING", sorted(set().union(*everyone)))

Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(), max_steps=1, logger=False, callbacks=[Look()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(BoringModel())
"""


@pytest.mark.slow
def test_all_that_listens_in_a_job_of_one_machine_listens_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=own_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "LISTENING ['127.0.0.1']" in done.stdout

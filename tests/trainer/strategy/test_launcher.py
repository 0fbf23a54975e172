from __future__ import annotations

import os
import threading
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatron import MegatronStrategy


def test_one_process_needs_no_launch_and_leaves_no_variable_or_thread(tmp_path: Path) -> None:
    environment, threads = dict(os.environ), set(threading.enumerate())
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MegatronStrategy(),
        default_root_dir=tmp_path,
        fast_dev_run=True,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert dict(os.environ) == environment
    assert set(threading.enumerate()) <= threads  # one of an earlier test may end meanwhile

"""Requeueing on Slurm without Lightning's signal handler, which saves while other ranks are in a collective."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

_log = logging.getLogger(__name__)


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal after which the job is to be queued again; ``None`` for none."""
    strategy = trainer.strategy
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else int(environment.requeue_signal)


def lead_requeued_job(folder: str | os.PathLike[str], checkpoint: str) -> None:
    """Link the name from which Lightning resumes a requeued job to a checkpoint; called by one rank."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = (re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", entry.name) for entry in folder.iterdir())
    number = max((int(match[1]) for match in found if match), default=0) + 1
    os.symlink(os.path.abspath(checkpoint), folder / f"hpc_ckpt_{number}.ckpt")


def requeue() -> bool:
    """Put this Slurm job back into its queue; called by one rank.

    Returns:
        True if Slurm has accepted it; otherwise its error is logged.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ.get("SLURM_JOB_ID", "") if array is None else f"{array}_{task}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        _log.error("Slurm job %s was not requeued: %s", job, error)
        return False
    if done.returncode:
        _log.error("Slurm job %s was not requeued: %s", job, done.stderr.strip() or f"status {done.returncode}")
    else:
        _log.info("Slurm job %s is requeued", job)
    return done.returncode == 0

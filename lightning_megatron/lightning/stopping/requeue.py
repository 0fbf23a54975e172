"""Requeueing on Slurm without Lightning's signal handler, which saves while other ranks are in a collective."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy

from lightning_megatron.lightning.environments.mpi import MpirunEnvironment

_log = logging.getLogger(__name__)
_BELOW_SLURM = (TorchElasticEnvironment, MpirunEnvironment, MPIEnvironment)
_INTERACTIVE = ("bash", "interactive")
"""Names of jobs that Lightning takes for interactive sessions."""


def requeue_signal(trainer: Trainer) -> int | None:
    """The signal after which the job must be requeued; ``None`` for none."""
    strategy = trainer.strategy
    return requeue_signal_of(strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None)


def requeue_signal_of(environment: ClusterEnvironment | None, variables: Mapping[str, str] = os.environ) -> int | None:
    """The signal after which a job with such an environment must be requeued; ``None`` for none.

    Lightning requeues only jobs started by ``srun``; here Slurm jobs that run ``torchrun`` or ``mpirun`` are, too.
    """
    if isinstance(environment, SLURMEnvironment):
        wanted = environment.requeue_signal if environment.auto_requeue else None
        return None if wanted is None else int(wanted)
    in_slurm = bool(variables.get("SLURM_JOB_ID")) and variables.get("SLURM_JOB_NAME") not in _INTERACTIVE
    return int(signal.SIGUSR1) if in_slurm and isinstance(environment, _BELOW_SLURM) else None


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

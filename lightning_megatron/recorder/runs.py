"""Folders of runs: one for each run, removed when it ends well."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lightning_megatron.recorder.file_format import State
from lightning_megatron.recorder.reading import FOLDER, RankView, last_written, read_run, runs_below

KEPT = 3
"""Number of failed runs that are kept."""
_OLD = 7 * 24 * 3600.0
_STARTING = 60.0
_OF_A_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


def run_folder(root: str | os.PathLike[str], own: str, variables: Mapping[str, str] = os.environ) -> Path:
    """Path of the folder of a run; every rank derives the same path, without communication.

    Args:
        root: ``default_root_dir``.
        own: name that is unique among the runs of the machine: the port of the rendezvous.
        variables: environment variables.
    """
    parts = [own, *(variables[name] for name in _OF_A_JOB if name in variables)]
    name = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in parts)
    return Path(os.path.abspath(root)) / FOLDER / f"run-{name}"


def remove_finished(folder: Path) -> None:
    """Remove the folder of a run if all its ranks have finished; every rank calls this at its end."""
    views = read_run(folder)
    if views and all(view.state == State.FINISHED for view in views):
        _remove(folder)


def remove_old(root: str | os.PathLike[str]) -> None:
    """Remove the folders of earlier runs below a ``default_root_dir``, except those of the newest failed runs."""
    folder = Path(os.path.abspath(root)) / FOLDER
    if not folder.is_dir():
        return
    over = [run for run in runs_below(folder) if _is_over(run)]
    for run in over:
        if all(view.state == State.FINISHED for view in read_run(run)):
            _remove(run)
    for run in [run for run in over if run.is_dir()][KEPT:]:
        _remove(run)


def _is_over(run: Path) -> bool:
    views = read_run(run)
    if not views:  # no readable file: removed, of another format, or about to be written
        return time.time() - (last_written(run) or 0.0) > _STARTING
    return not any(_runs(view) for view in views)


def _runs(view: RankView) -> bool:
    """True if a rank may still be running; one on another host is judged by its last sign of life."""
    if view.state != State.RUNNING or view.is_dead:
        return False
    return view.is_stopped or time.time() - view.beat / 1e9 < _OLD


def _remove(run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):  # there are other runs
        run.parent.rmdir()

"""``op_report.json``: the implementations of ops that a run uses, next to its logs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.registry import Ops, choices_of

NAME = "op_report.json"


def write_op_report(module: LightningModule, ops: Ops, mesh: ParallelMesh) -> None:
    """Write the implementations that modules have chosen, and fallbacks of calls so far; all ranks call this.

    The file is in the log folder of the first logger that has one (TensorBoard's and CSV's do). No file is written
    under ``fast_dev_run``, nor to remote storage.
    """
    trainer = module.trainer
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    modules = choices_of(module)
    if mesh.pp.size > 1:  # the stages of one pipeline make up one model
        is_source = mesh.tp.rank == mesh.dp_cp.rank == 0
        modules = {
            name: chosen
            for stage in all_gather_object(mesh, modules if is_source else {})
            for name, chosen in stage.items()
        }
    found = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    folders = [str(folder) for folder in found if folder and isinstance(folder, str | os.PathLike)]
    if not trainer.is_global_zero or not folders or "://" in folders[0]:
        return
    modes = ops.modes if isinstance(ops.modes, str | None) else dict(ops.modes)
    content = {"device": ops.device, "modes": modes, "torch": torch.__version__, "modules": modules}
    try:
        _write(Path(folders[0]), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        rank_zero_warn(f"{NAME} was not written: {error}")


def _write(folder: Path, text: str) -> None:
    """Write under a temporary name, so that the file is never incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{NAME}.{os.getpid()}"
    unfinished.write_text(text)
    unfinished.replace(folder / NAME)

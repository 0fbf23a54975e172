"""``op_report.json``: which versions of ops a run computes with, beside its logs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.checkpoint.together import gathered
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.choice import Ops
from lightning_megatron.ops.report import choices_of

NAME = "op_report.json"


def write_op_report(module: LightningModule, ops: Ops, mesh: ParallelMesh) -> None:
    """Write what the modules of one model have chosen, and what calls so far made of it; all ranks call this.

    It goes into the Trainer's ``log_dir``, or where there is none its ``default_root_dir``; not for ``fast_dev_run``,
    and not to remote storage.
    """
    trainer = module.trainer
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    folder = str(trainer.log_dir or trainer.default_root_dir)  # all ranks are needed for this
    modules = choices_of(module)
    if mesh.pp.size > 1:  # the stages of one pipeline make up one model
        speaks = mesh.tp.rank == mesh.dp_cp.rank == 0
        modules = {
            name: chosen for stage in gathered(mesh, modules if speaks else {}) for name, chosen in stage.items()
        }
    if not trainer.is_global_zero or "://" in folder:
        return
    wishes = ops.wishes if isinstance(ops.wishes, str | None) else dict(ops.wishes)
    content = {"device": ops.device, "wishes": wishes, "torch": torch.__version__, "modules": modules}
    try:
        _write(Path(folder), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        rank_zero_warn(f"{NAME} was not written: {error}")


def _write(folder: Path, text: str) -> None:
    """Under its name there is never half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{NAME}.{os.getpid()}"
    unfinished.write_text(text)
    unfinished.replace(folder / NAME)

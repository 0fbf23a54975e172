"""The section "A saved tensor" of docs/design.md, held against the calls of a save."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch

import lightning_megatron
from lightning_megatron.checkpoint import SaveGuard, model_state, save
from lightning_megatron.mesh import ParallelMesh

FOLDER = Path(lightning_megatron.__file__).parent / "checkpoint"
DESIGN = FOLDER.parents[1] / "docs" / "design.md"


def steps() -> dict[str, str]:
    """Function of each module of the numbered list, by the module."""
    section = DESIGN.read_text().split("## A saved tensor")[1].split("\n## ")[0]
    return dict(re.findall(r"^\d+\. `(.*?)` \(`(.*?)`\)", section, re.MULTILINE))


def test_a_tensor_passes_ten_modules_with_three_returns(tmp_path: Path) -> None:
    walk = steps()
    stack: list[str | None] = []
    visits: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            module = str(path.relative_to(FOLDER)) if path.is_relative_to(FOLDER) else ""
            is_step = walk.get(module, "").rpartition(".")[2] == frame.f_code.co_name
            if frame.f_code.co_name == "record":  # the other files have no tensors
                is_step = getattr(frame.f_locals.get("file"), "suffix", "") == ".distcp"
            stack.append(module if is_step else None)
            if is_step:
                visits.append(module)
        elif event == "return" and stack and stack.pop():
            callers = [module for module in stack if module]
            if callers == ["saving.py"]:  # between its calls
                visits.append("saving.py")

    sys.setprofile(note)
    try:
        mesh = ParallelMesh.single()
        save(tmp_path / "a.ckpt", model_state({"weight": torch.ones(2, 3)}, {}, mesh), {}, mesh, guard=SaveGuard())
    finally:
        sys.setprofile(None)
    assert visits.pop() == "saving.py", "which then is done"
    visits = [module for module, before in zip(visits, ["", *visits], strict=False) if module != before]
    assert list(dict.fromkeys(visits)) == list(walk)
    assert len(walk) == 10
    assert len(visits) - len(walk) == 3, visits

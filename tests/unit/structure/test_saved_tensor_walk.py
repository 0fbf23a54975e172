"""The section "A save" of docs/walks.md, held against the calls of a save."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from lightning_megatron.checkpoint import SaveGuard, model_state, save
from lightning_megatron.mesh import ParallelMesh
from tests.walks import PACKAGE, steps_of


def test_a_tensor_passes_ten_modules_with_three_returns(tmp_path: Path) -> None:
    walk = dict(step for step in steps_of("A save") if step.module.startswith("checkpoint/"))
    stack: list[str | None] = []
    visits: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            module = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
            is_step = walk.get(module, "").rpartition(".")[2] == frame.f_code.co_name
            if frame.f_code.co_name == "record":  # the other files have no tensors
                is_step = getattr(frame.f_locals.get("file"), "suffix", "") == ".distcp"
            stack.append(module if is_step else None)
            if is_step:
                visits.append(module)
        elif event == "return" and stack and stack.pop():
            callers = [module for module in stack if module]
            if callers == ["checkpoint/saving.py"]:  # between its calls
                visits.append("checkpoint/saving.py")

    sys.setprofile(note)
    try:
        mesh = ParallelMesh.single()
        save(tmp_path / "a.ckpt", model_state({"weight": torch.ones(2, 3)}, {}, mesh), {}, mesh, guard=SaveGuard())
    finally:
        sys.setprofile(None)
    assert visits.pop() == "checkpoint/saving.py", "which then is done"
    visits = [module for module, before in zip(visits, ["", *visits], strict=False) if module != before]
    assert list(dict.fromkeys(visits)) == list(walk)
    assert len(walk) == 10
    assert len(visits) - len(walk) == 3, visits

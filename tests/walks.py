"""The walks of docs/walks.md, and the calls of a run held against them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lightning_megatron

PACKAGE = Path(lightning_megatron.__file__).parent
PAGE = PACKAGE.parent / "docs" / "walks.md"
WALKS = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)


class Step(NamedTuple):
    """A step of a walk.

    Attributes:
        module: path of its module in the package.
        function: its name in the module.
    """

    module: str
    function: str

    def resolve(self) -> Any:
        """The function, or class."""
        module = import_module("lightning_megatron." + self.module.removesuffix(".py").replace("/", "."))
        return attrgetter(self.function)(module)


def text_of(walk: str) -> str:
    """The section of a walk."""
    return PAGE.read_text().split(f"## {walk}\n")[1].split("\n## ")[0]


def steps_of(walk: str) -> list[Step]:
    """The numbered list of a walk."""
    return [Step(*found) for found in re.findall(r"^\d+\. `(.*?)` \(`(.*?)`\)", text_of(walk), re.MULTILINE)]


def profiled(note: Callable[[FrameType, str, object], None], run: Callable[[], object]) -> None:
    """Run a function, with a profiler in this thread."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)


def first_calls(steps: list[Step], run: Callable[[], object]) -> tuple[list[Step], set[str]]:
    """Steps in the order of their first calls in this thread, and the folders of all that is called inside of them."""
    codes = {inspect.unwrap(step.resolve()).__code__: step for step in steps}
    found: dict[Step, None] = {}
    folders: set[str] = set()
    inside = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside
        if event == "call":
            if (step := codes.get(frame.f_code)) is not None:
                found.setdefault(step)
                inside += 1
            if inside and (file := Path(frame.f_code.co_filename)).is_relative_to(PACKAGE):
                folders.add(file.parent.relative_to(PACKAGE).as_posix())
        elif event == "return" and frame.f_code in codes:
            inside -= 1

    profiled(note, run)
    return list(found), folders

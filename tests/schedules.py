"""Schedules from texts."""

from __future__ import annotations

import re

from lightning_megatron.pipeline.action import Action, Schedule


def parse_action(text: str) -> Action:
    """An action as ``str`` writes it."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
    assert match is not None, text
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern admits the four only


def parse_schedule(text: str) -> Schedule:
    """A schedule as ``format_schedule`` writes it; empty cells, torch's idle slots, are left out."""
    return [[parse_action(cell) for cell in row.split(",") if cell.strip()] for row in text.splitlines()]

"""All hostile files."""

from __future__ import annotations

from pathlib import Path

from hostile_case import Case
from hostile_checkpoints import checkpoints, single_files
from hostile_data import configurations, text, tokenizers, tokens
from hostile_models import hugging_face, megatron


def all_cases(mark: Path) -> list[Case]:
    """Every one.

    Args:
        mark: a file that must not come into being.
    """
    found: list[Case] = []
    for part in (checkpoints, single_files, hugging_face, megatron, tokenizers, tokens, text, configurations):
        found += part(mark)
    assert len({(case.kind, case.name) for case in found}) == len(found)
    return found

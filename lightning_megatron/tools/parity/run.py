"""Run of one of the compared trainings, in its own processes, and its record."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.parity.difference import Step

_SHOWN = 3000
"""Characters of a failed run's output that are shown, from its end."""


class RunError(RuntimeError):
    """A run that has failed; its text is the end of the output."""


def run(recipe: Mapping[str, Any], folder: Path, seconds: float) -> list[Step]:
    """Train by a recipe, and return the steps.

    Args:
        folder: folder for its files, which is made.
        seconds: time limit.

    Raises:
        RunError: if it fails.
    """
    import yaml

    folder.mkdir()
    record, contents = folder / "steps.json", copy.deepcopy(dict(recipe))
    callback = {"class_path": "lightning_megatron.tools.parity.record.ParityRecord", "init_args": {"file": str(record)}}
    contents["trainer"] |= {"default_root_dir": str(folder), "callbacks": [callback]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(contents))
    environment = {"OMP_NUM_THREADS": "1", **own_environment()}
    command = [
        sys.executable,
        "-m",
        "lightning_megatron.tools.cli.main",
        "fit",
        "--config",
        str(folder / "recipe.yaml"),
    ]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"it did not end in {seconds:.0f} s") from None
    if done.returncode or not record.is_file():
        raise RunError((done.stderr or done.stdout)[-_SHOWN:])
    return [Step.of(step) for step in json.loads(record.read_text())]

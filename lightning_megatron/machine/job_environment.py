"""Environment variables of a job, which the processes of another job must not inherit."""

from __future__ import annotations

import os

_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "HLS_MODULE_ID", "ID")


def own_environment(**more: str) -> dict[str, str]:
    """Environment for a job of its own: ``more``, and all but what launchers and Trainers leave in this process."""
    return {name: value for name, value in os.environ.items() if name not in _OF_A_JOB} | more

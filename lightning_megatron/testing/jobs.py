"""Helper of tests that start a job of their own: a script whose Trainer may start further processes."""

from __future__ import annotations

import os

_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "HLS_MODULE_ID", "ID")


def own_environment(**more: str) -> dict[str, str]:
    """Environment of such a job, without the variables that Trainers of this process have left there.

    Args:
        **more: additional variables.
    """
    return {name: value for name, value in os.environ.items() if name not in _OF_A_JOB} | more

"""The state of a run that begins with imported weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning

IMPORTED_FROM = "imported_from"
"""Key of a checkpoint that was converted from another format, and so begins a run instead of continuing one."""


def fresh_run(hyper_parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Lightning's dictionary of a run that has not begun: no loops, callbacks, schedulers or optimizers to restore."""
    given = {} if hyper_parameters is None else {"hyper_parameters": dict(hyper_parameters)}
    return {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "lr_schedulers": [],
        **given,
    }

"""Graphs that ``torch.compile`` made of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters


def compiled(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, list[str]]:
    """Result of a run that begins with nothing compiled, its number of graphs, and the reasons for breaks."""
    torch.compiler.reset()
    counters.clear()
    found = run(*args, **kwargs)
    return found, counters["stats"]["unique_graphs"], list(counters["graph_break"])

"""What ``torch.compile`` made of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.utils import counters


def compiled(run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int, list[str]]:
    """What a run returns that begins with nothing compiled, how many graphs it made, and what broke them."""
    torch.compiler.reset()
    counters.clear()
    found = run(*args, **kwargs)
    return found, counters["stats"]["unique_graphs"], list(counters["graph_break"])

"""``hpu_backend`` of ``torch.compile``: the compiler's whole front end, whose graphs are run without optimization.

torch finds it by an entry point, so that the compiler is not imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from simulated_hpu import events
from torch._dynamo.backends.common import aot_autograd


def _compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Make a function of a graph: forward, backward, or forward of an evaluation."""
    begun = perf_counter()
    made: Callable[..., Any] = make_boxed_func(graph.forward)
    microseconds = max(1, round(1e6 * (perf_counter() - begun)))
    events.emit(events.GRAPH_COMPILATION, duration=str(microseconds), recipe="simulated")
    return made


def hpu_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph and its backward."""
    both = aot_autograd(fw_compiler=_compiled, bw_compiler=_compiled, inference_compiler=_compiled)
    found: Callable[..., Any] = both(graph, inputs)
    return found

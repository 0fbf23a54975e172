"""Events of the simulated software, and functions that are called at each; the real one has them in C++."""

from __future__ import annotations

from collections.abc import Callable

GRAPH_COMPILATION = "graph_compilation"
CPU_FALLBACK = "cpu_fallback"

Parameters = dict[str, str]
_listeners: dict[str, list[Callable[[Parameters], None]]] = {}


def subscribe(event: str, listener: Callable[[Parameters], None]) -> None:
    """Call ``listener`` at each event of a kind from now on."""
    _listeners.setdefault(event, []).append(listener)


def emit(event: str, **parameters: str) -> None:
    """Call the listeners of an event.

    Args:
        event: kind of event.
        **parameters: values as the bridge sends them: text.
    """
    for listener in _listeners.get(event, []):
        listener(parameters)

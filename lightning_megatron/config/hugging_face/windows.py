"""Sliding windows in the spellings of ``config.json``: of all layers, by a list of kinds, or by a layer's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_megatron.config.reader import ConfigReader
from lightning_megatron.errors import is_whole

_WINDOW, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 100_000


def window_from_hf(reader: ConfigReader) -> int:
    """The window of the layers that have one; null stands for none."""
    window = reader.get("sliding_window", None)
    if window is None or is_whole(window, at_least=1):
        return int(window or 0)
    reader.refuse("sliding_window", window, "must be a whole number of at least 1, or null", (1, None))
    return 0


def layer_windows_from_hf(
    reader: ConfigReader, layers: int, window: int, usual: Callable[[int], bool]
) -> dict[str, Any]:
    """Fields of windows where ``layer_types`` lists the kinds of layers.

    Args:
        layers: number of layers.
        window: window of the layers that have one; 0 for none.
        usual: function of a layer's number that returns True if it has one, for files without the list.
    """
    if layers > _MOST_LAYERS:
        reader.refuse("num_hidden_layers", layers, "is more than any model has")
        return {}
    kinds = reader.get("layer_types", None)
    if kinds is None:
        kinds = [_WINDOW if usual(number) else _FULL for number in range(layers)]
    listed = len(kinds) if isinstance(kinds, list) else None
    if listed not in (None, layers):
        reader.refuse("num_hidden_layers", layers, f"layer_types lists {listed} of them", (listed,))
    if listed != layers or any(kind not in (_WINDOW, _FULL) for kind in kinds):
        reader.refuse("layer_types", kinds, f"must be a list of {layers} words: {_WINDOW}, {_FULL}", (None,))
        return {}
    chosen = tuple(number for number, kind in enumerate(kinds) if kind == _WINDOW)
    if not chosen:
        return {}
    if not window:
        needed = f"layers of the kind {_WINDOW} need a window"
        reader.refuse("sliding_window", None, needed)
        reader.refuse("layer_types", kinds, needed)
        return {}
    return {"sliding_window": window, "sliding_window_layers": () if len(chosen) == layers else chosen}


def kinds_to_hf(reader: ConfigReader) -> dict[str, Any]:
    """Entries of windows by a list of kinds."""
    return {
        "sliding_window": reader["sliding_window"] or None,
        "layer_types": [_WINDOW if has else _FULL for has in _have_one(reader)],
    }


def windows_from_hf(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """Fields of Qwen's windows, which only layers from ``max_window_layers`` on have."""
    window = _switched(reader)
    first = reader.get("max_window_layers", 28)
    return layer_windows_from_hf(reader, layers, window, lambda number: window > 0 and number >= first)


def windows_to_hf(reader: ConfigReader) -> dict[str, Any]:
    """Entries of Qwen's windows."""
    first = next((number for number, has in enumerate(_have_one(reader)) if has), reader["num_layers"])
    return {"use_sliding_window": bool(reader["sliding_window"]), "max_window_layers": first, **kinds_to_hf(reader)}


def window_everywhere_from_hf(reader: ConfigReader) -> dict[str, Any]:
    """Fields of Qwen's window where all layers have it."""
    return {"sliding_window": _switched(reader)}


def window_everywhere_to_hf(reader: ConfigReader, architecture: str) -> dict[str, Any]:
    """Entries of Qwen's window where all layers have it."""
    window = one_window(reader, architecture)
    return {"use_sliding_window": window is not None, "sliding_window": window}


def one_window(reader: ConfigReader, architecture: str) -> int | None:
    """The window of all layers; ``None`` if there is none."""
    window, everywhere = reader["sliding_window"] or None, tuple(range(reader["num_layers"]))
    reader.expect("sliding_window_layers", (), ((), everywhere), f"{architecture} has one window in all layers")
    return window


def _switched(reader: ConfigReader) -> int:
    window = window_from_hf(reader)
    return window if reader.get("use_sliding_window", False) else 0


def _have_one(reader: ConfigReader) -> list[bool]:
    """For each layer, True if it has a window."""
    window, chosen = reader["sliding_window"], reader["sliding_window_layers"]
    return [window > 0 and (not chosen or number in chosen) for number in range(reader["num_layers"])]

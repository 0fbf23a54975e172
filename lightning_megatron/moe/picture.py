"""Tokens of each expert as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Counts = Mapping[int, Sequence[int]]
"""Tokens of each expert, by number of the layer."""


def imbalance(counts: Sequence[int]) -> float:
    """The fullest expert's tokens over an even share; 1 is even."""
    return max(counts) * len(counts) / total if (total := sum(counts)) else 1.0


def text_table(counts: Counts) -> str:
    """A row a layer: tokens of each expert, their sum, and how uneven they are."""
    experts = max(len(row) for row in counts.values())
    header = ["layer", *(str(e) for e in range(experts)), "tokens", "max/mean"]
    rows = [
        [str(layer), *(str(n) for n in row), str(sum(row)), f"{imbalance(row):.2f}"] for layer, row in counts.items()
    ]
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *rows)]
    return "\n".join(lines)


def heat_map(counts: Counts, title: str = "") -> Any:
    """A matplotlib figure: layers from top to bottom, experts from left to right, colour by share of an even load.

    Raises:
        ImportError: if matplotlib is missing, with the command that installs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'lightning-megatron[plot]'") from error
    shares = [[n * len(row) / (sum(row) or 1) for n in row] for row in counts.values()]
    figure = Figure(figsize=(max(4.0, 0.5 * len(shares[0]) + 2), max(2.5, 0.28 * len(shares) + 1.2)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(counts)), [str(layer) for layer in counts])
    axes.set_title(title)
    figure.colorbar(image, label="tokens / even share")
    figure.tight_layout()
    return figure

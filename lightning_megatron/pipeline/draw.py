"""Drawings of a simulated schedule: one row per pipeline rank, time from left to right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from lightning_megatron.errors import how_to_install
from lightning_megatron.pipeline.action import Action, Kind, chunk_of
from lightning_megatron.pipeline.simulate import Simulation

COLOURS: dict[Kind, str] = {"F": "#4878b0", "B": "#3c9d6b", "I": "#35a3a0", "W": "#a0a35a"}
NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw_text(simulation: Simulation, width: int = 120) -> str:
    """Draw the timeline as text.

    An action is a ``|``, its name, and dashes up to its end; blanks between actions are idle time. All names have the
    same form, the longest that fits into every action: with the stage if ranks have several (``2F0``), else kind and
    micro-batch (``F0``), or the kind alone (``F``).

    Args:
        simulation: the schedule in time.
        width: columns of the longest line; a schedule of many actions takes at least two columns an action.
    """
    slots = list(chain(*simulation.timeline))
    if not slots:
        return ""
    margin = len(f"rank {len(simulation.timeline) - 1} ")
    shortest = min((slot.end - slot.start for slot in slots if slot.end > slot.start), default=1.0)
    scale = max((width - margin) / (simulation.step_time or 1.0), 2 / shortest)
    several = any(slot.action.stage != rank for rank, row in enumerate(simulation.timeline) for slot in row)
    forms: list[Callable[[Action], str]] = [str] * several + [_without_stage, _kind]
    widest = max(len(forms[0](slot.action)) for slot in slots)
    scale = min(int(scale * shortest), widest + 2) / shortest  # whole columns, so that equal times look equal
    widths = [(slot.action, round(slot.end * scale) - round(slot.start * scale) - 1) for slot in slots]
    name = next((form for form in forms if all(len(form(action)) <= width for action, width in widths)), _kind)
    lines = []
    for rank, row in enumerate(simulation.timeline):
        line = f"rank {rank}".ljust(margin)
        for slot in row:
            start, end = (margin + round(time * scale) for time in (slot.start, slot.end))
            line = line.ljust(start) + ("|" + name(slot.action).ljust(end - start - 1, "-"))[: end - start]
        lines.append(line + "|")
    return "\n".join(lines)


def _without_stage(action: Action) -> str:
    return f"{action.kind}{action.microbatch}"


def _kind(action: Action) -> str:
    return action.kind


def draw_png(simulation: Simulation, path: str | Path, title: str = "") -> None:
    """Write the timeline as a PNG, below a title; later chunks of a rank are lighter, the number is the micro-batch.

    Raises:
        ImportError: if matplotlib is missing, with the command that installs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {how_to_install('plot')}") from error

    pp = len(simulation.timeline)
    slots = list(chain(*simulation.timeline))
    chunks = 1 + max((chunk_of(slot.action.stage, pp) for slot in slots), default=0)
    most = max((len(row) for row in simulation.timeline), default=1)
    figure = Figure(figsize=(min(max(8.0, 0.28 * most * 1.5), 60.0), 0.5 * pp + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, row in enumerate(simulation.timeline):
        for slot in row:
            fade = 0.55 * chunk_of(slot.action.stage, pp) / chunks
            colour = tuple(part + (1 - part) * fade for part in to_rgb(COLOURS[slot.action.kind]))
            box = [(slot.start, slot.end - slot.start)]
            axes.broken_barh(box, (rank - 0.45, 0.9), facecolor=colour, edgecolor="white", linewidth=0.6)
            axes.text((slot.start + slot.end) / 2, rank, str(slot.action.microbatch), ha="center", va="center", size=7)
    kinds = [kind for kind in NAMES if any(slot.action.kind == kind for slot in slots)]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4, frameon=False)
    axes.set(xlim=(0, simulation.step_time or 1), ylim=(pp - 0.5, -0.5), xlabel="time", title=title)
    axes.set_yticks(range(pp), [f"rank {rank}" for rank in range(pp)])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")

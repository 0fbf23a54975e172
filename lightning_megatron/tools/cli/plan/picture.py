"""Pictures of plans: memory by cause, and speed on more devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_megatron.errors import ConfigError, how_to_install
from lightning_megatron.tools.planning.plan import Plan
from lightning_megatron.tools.planning.request import PlanRequest
from lightning_megatron.tools.planning.search import search
from lightning_megatron.tools.planning.settings import layout_words

MOST_DEVICES = 10_000
_GIB = 2**30


def scaling(request: PlanRequest) -> Iterator[Plan]:
    """The best plan on these devices, and on twice, four times, ... as many, up to 10,000, with the same global batch.

    Numbers of devices on which nothing fits, or that the batch does not split over, are left out.
    """
    devices = request.num_devices
    while devices <= max(MOST_DEVICES, request.num_devices):
        try:
            found = search(replace(request, num_devices=devices), top=1)
        except ConfigError:
            found = None
        if found is not None:
            yield from found.plans
        devices *= 2


def draw(plans: Sequence[Plan], scaled: Sequence[Plan], path: str, title: str) -> None:
    """Write a PNG: a bar of memory for each plan, and tokens/s over the number of devices.

    Args:
        plans: plans on the devices at hand.
        scaled: best plans on more and more devices.
        path: file to write.
        title: title above the picture.

    Raises:
        ImportError: if matplotlib is missing, with the command that installs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {how_to_install('plot')}") from error

    figure = Figure(figsize=(14.0, 2.6 + 0.5 * max(len(plans), 5)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, size=10)
    bars, curve = figure.subplots(1, 2)
    _memory_bars(bars, plans)
    _scaling_curve(curve, scaled)
    figure.savefig(path, dpi=120, format="png")


def _memory_bars(axes: Any, plans: Sequence[Plan]) -> None:
    """Stacked bars, one for each plan, with the limit as a line."""
    from matplotlib import colormaps

    causes = list(dict.fromkeys(cause for plan in plans for cause in plan.memory.by_cause))
    largest = max(plan.memory.peak for plan in plans)
    left = [0.0] * len(plans)
    colours = colormaps["tab20"]
    for number, cause in enumerate(causes):
        sizes = [plan.memory.by_cause.get(cause, 0) / _GIB for plan in plans]
        shown = cause if max(sizes) > 0.01 * largest / _GIB else None
        axes.barh(range(len(plans)), sizes, left=left, label=shown, color=colours(number % 20))
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    if plans[0].limit is not None:
        axes.axvline(plans[0].limit / _GIB, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(plans)), [layout_words(plan.job) for plan in plans], size=6)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the fullest rank")
    axes.legend(fontsize=6, frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.1), ncols=4)
    axes.spines[["top", "right"]].set_visible(False)


def _scaling_curve(axes: Any, plans: Sequence[Plan]) -> None:
    """Tokens/s of the best plans, with a line of ideal scaling from the first."""
    points = [(plan.job.world_size, plan.time.tokens_per_second, plan.time.mfu) for plan in plans if plan.time]
    if not points:
        axes.set_visible(False)
        return
    devices, rates = [point[0] for point in points], [point[1] for point in points]
    axes.plot(devices, [rates[0] * count / devices[0] for count in devices], color="grey", linestyle=":", label="ideal")
    axes.plot(devices, rates, marker="o", label="best layout, same global batch")
    for count, rate, share in points:
        axes.annotate(f"MFU {share:.0%}", (count, rate), textcoords="offset points", xytext=(4, -9), size=6)
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel="tokens/s")
    axes.set_xticks(devices, [f"{count:,}" for count in devices], size=6)
    axes.minorticks_off()
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)

"""Table of the ranks of a failed run, the culprit first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_megatron.recorder.diagnosis import Diagnosis, describe_actions, describe_state
from lightning_megatron.recorder.reading import RankView

_SHOWN = 32
_COLUMNS = ("rank", "host", "device", "pid", "state", "action", "since")


def render(views: Sequence[RankView], diagnosis: Diagnosis, now: int) -> str:
    """Render the table as text, culprits first; ``now`` is the time of the report, in nanoseconds of the clock."""
    order = [*diagnosis.culprits, *(view.rank for view in views if view.rank not in diagnosis.culprits)]
    by_rank = {view.rank: view for view in views}
    rows = [_row(by_rank[rank], now) for rank in order[:_SHOWN]]
    widths = [max(len(row[column]) for row in [_COLUMNS, *rows]) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [_COLUMNS, *rows]]
    head = f"First to blame: {diagnosis.reason}" if diagnosis.culprits else "No rank stands out."
    more = [f"... and {len(order) - _SHOWN} more ranks"] if len(order) > _SHOWN else []
    return "\n".join([head, *(line.rstrip() for line in lines), *more])


def _row(view: RankView, now: int) -> tuple[str, ...]:
    began = view.under_way[-1].begun if view.under_way else view.active
    since = f"{max(0, now - began) / 1e9:.1f} s" if began else "-"
    state = describe_state(view)
    state = state if len(state) <= 60 else state[:57] + "..."
    return (
        str(view.rank),
        view.host or "-",
        view.device or "-",
        str(view.pid or "-"),
        state,
        describe_actions(view),
        since,
    )


def last_actions(view: RankView, count: int) -> str:
    """Render the last actions of a rank, one per line, the newest last."""
    lines = []
    for record in view.last[-count:] if count else ():
        took = f"{(record.ended - record.begun) / 1e6:.1f} ms" if record.ended else "not ended"
        before = f"{(view.active - record.begun) / 1e9:8.3f} s before its last"
        lines.append(f"  {before}: step {record.step}, {record} ({took})")
    return "\n".join([f"rank {view.rank}, its last actions:", *lines])


def as_json(views: Sequence[RankView], diagnosis: Diagnosis, last: int) -> dict[str, Any]:
    """Table, and the ``last`` actions of each rank, as values for JSON."""
    return {
        "culprits": list(diagnosis.culprits),
        "is_fact": diagnosis.is_fact,
        "reason": diagnosis.reason,
        "ranks": [
            {
                "rank": view.rank,
                "host": view.host,
                "device": view.device,
                "pid": view.pid,
                "state": describe_state(view),
                "exit_status": view.process.status,
                "error": view.error,
                "action": describe_actions(view),
                "active": view.active,
                "under_way": [_plain(record) for record in view.under_way],
                "last": [_plain(record) for record in view.last[-last:]] if last else [],
            }
            for view in views
        ],
    }


def _plain(record: Any) -> dict[str, Any]:
    return {**asdict(record), "kind": record.kind.name.lower(), "text": str(record)}

"""Diagnosis of a failed run: find the rank that died or raised first, is stopped, or keeps the others waiting."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.process import ProcessState, describe_exit
from lightning_megatron.recorder.reading import RankView, Record

_TOLD = 4
"""Most ranks that the text about a deadlock lists."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a run.

    Attributes:
        culprits: ranks to blame, the most likely cause first; empty if nothing is wrong.
        is_fact: True if the first is dead, has raised, is stopped or never came; False if it is inferred from waits.
        reason: text that explains the blame.
    """

    culprits: tuple[int, ...] = ()
    is_fact: bool = False
    reason: str = ""


def diagnose(views: Sequence[RankView]) -> Diagnosis:
    """Find the ranks to blame, from the views of all ranks."""
    by_rank = {view.rank: view for view in views}
    if failed := _failed(views):
        return Diagnosis(tuple(failed), True, _about(by_rank[failed[0]]))
    if roots := _awaited_in_the_end(by_rank):
        actions = (record for view in views if view.rank not in roots for record, _ in unmet(view, by_rank))
        waiting = next(actions, None)
        for_what = "" if waiting is None else f": others wait for it in {waiting}"
        return Diagnosis(tuple(roots), False, f"{_about(by_rank[roots[0]])}{for_what}")
    if stuck := _stuck(views):
        return Diagnosis(tuple(stuck), False, _about(by_rank[stuck[0]]))
    if aborted := [view.rank for view in views if _aborted(view)]:
        return Diagnosis(tuple(aborted), True, _about(by_rank[aborted[0]]))
    return _deadlock(views)


def _failed(views: Sequence[RankView]) -> list[int]:
    """Ranks that raised or died, the earliest first; then those that are stopped; then those that never came."""
    ended = sorted(
        filter(_ended_by_itself, views), key=lambda view: view.since if view.state == State.RAISED else view.active
    )
    stopped = [view for view in views if view.is_stopped]
    absent = [] if any(map(_has_met, views)) else [view for view in views if view.state is None]
    return [view.rank for view in (*ended, *stopped, *absent)]


def _stuck(views: Sequence[RankView]) -> list[int]:
    """Ranks whose host stays in a collective that should not block it, unless all do."""
    found = [view.rank for view in views if view.runs_ahead and view.waits_in is not None]
    return found if len(found) < len(views) else []


def _deadlock(views: Sequence[RankView]) -> Diagnosis:
    """Diagnosis of ranks that wait for each other in different actions; empty if they do not."""
    waits = {view.rank: view.waits_in for view in views if view.waits_in is not None}
    if len({_same(record) for record in waits.values()}) < 2:
        return Diagnosis()
    told = ", ".join(f"rank {rank} in {record}" for rank, record in list(waits.items())[:_TOLD])
    return Diagnosis(tuple(waits), False, f"ranks wait for each other in different actions: {told}")


def _has_met(view: RankView) -> bool:
    """True if a rank has passed the rendezvous. Then all ranks have started: one without a file uses another folder."""
    return any(record.kind not in (Kind.START, Kind.RENDEZVOUS, Kind.END) for record in view.last)


def _ended_by_itself(view: RankView) -> bool:
    if view.state == State.RAISED:
        return True
    by_another = view.process.state == ProcessState.ENDED_BY_LAUNCHER or _aborted(view) or _was_in_a_hang(view)
    return view.is_dead and not by_another


def _was_in_a_hang(view: RankView) -> bool:
    """True if a rank that runs ahead was inactive for long before it ended in an unknown way.

    The backend's watchdog has probably ended it, or a launcher after that of another rank.
    """
    is_unknown = view.process.status in (None, -signal.SIGTERM)
    return view.runs_ahead and is_unknown and view.beat - view.active > view.timeout / 2 * 1e9


def _aborted(view: RankView) -> bool:
    """True for SIGABRT: the backend's own watchdog ends a rank so when its peers do not come; the rank is innocent."""
    return view.is_dead and view.process.status == -signal.SIGABRT


def _same(record: Record | None) -> tuple[object, ...]:
    return () if record is None else (record.kind, record.group, record.within, record.peer)


def unmet(view: RankView, by_rank: Mapping[int, RankView]) -> list[tuple[Record, list[int]]]:
    """Actions in which this rank waits, or may wait, each with the ranks that have not yet reached it.

    A rank that runs ahead waits for its device, wherever it next needs a result, and the device for the other ranks.
    So all its collectives and messages count.
    """
    record = view.waits_in
    if record is not None:
        return [(record, _missing(view, record, by_rank))]
    if not view.runs_ahead:
        return []
    meetings = (record for record in view.last if record.kind >= Kind.ALL_REDUCE and record.waiting)
    newest = {(record.group, record.peer, record.peer >= 0 and record.kind): record for record in meetings}
    found = [(record, _missing(view, record, by_rank)) for record in newest.values()]
    return [(record, ranks) for record, ranks in found if ranks]


def _missing(view: RankView, record: Record, by_rank: Mapping[int, RankView]) -> list[int]:
    """Ranks that have not yet reached an action of this rank."""
    if record.kind == Kind.RENDEZVOUS:  # of all ranks, and without a number
        return [rank for rank, other in by_rank.items() if other.state is not None and not _is_at_rendezvous(other)]
    if record.peer >= 0:
        return [record.peer] if not record.ended or _owes(by_rank.get(record.peer), record, view.rank) else []
    members = view.groups.get(record.group) or tuple(by_rank)
    others = [rank for rank in members if rank != view.rank and rank in by_rank]
    return [rank for rank in others if by_rank[rank].reached(record.group) < record.within]


def _owes(peer: RankView | None, message: Record, rank: int) -> bool:
    """True if the peer of a message of ``rank`` is known not to have begun its part."""
    other_end = Kind.SEND if message.kind == Kind.RECEIVE else Kind.RECEIVE
    begun = None if peer is None else peer.exchanged(other_end, message.group, rank)
    return begun is not None and begun < message.within


def _awaited(view: RankView, by_rank: Mapping[int, RankView]) -> list[int]:
    return [rank for _, ranks in unmet(view, by_rank) for rank in ranks]


def _is_at_rendezvous(view: RankView) -> bool:
    return view.waits_in is not None and view.waits_in.kind == Kind.RENDEZVOUS


def _awaited_in_the_end(by_rank: Mapping[int, RankView]) -> list[int]:
    """Ranks at the ends of all chains of waits, which wait for no other rank; the one with most waiters first."""
    counts = Counter(rank for view in by_rank.values() for rank in _leaves(view, by_rank))
    return sorted(counts, key=lambda rank: (-counts[rank], by_rank[rank].active, rank))


def _leaves(view: RankView, by_rank: Mapping[int, RankView]) -> set[int]:
    seen, leaves = {view.rank}, set()
    todo = _awaited(view, by_rank)
    while todo:
        rank = todo.pop()
        if rank in seen or rank not in by_rank:
            continue
        seen.add(rank)
        awaited = _awaited(by_rank[rank], by_rank)
        if not awaited and by_rank[rank].waits_in is None:
            leaves.add(rank)
        todo += awaited
    return leaves


def describe_state(view: RankView) -> str:
    """Describe the state of a rank."""
    if view.state is None:
        return "has not come"
    if view.state == State.FINISHED:
        return "finished"
    if view.state == State.RAISED:
        return f"raised {view.error}"
    if view.process.state == ProcessState.ENDED_BY_LAUNCHER:
        return "ended by the launcher"
    if view.state == State.LOST:
        return "lost a peer"
    if view.is_dead:
        return "dead: " + describe_exit(view.process.status)
    return "stopped" if view.is_stopped else "running"


def describe_actions(view: RankView) -> str:
    """Describe the step and the unfinished actions of a rank, or its last action if none is unfinished."""
    if view.state is None:
        return "-"
    if not view.under_way:
        before = [record for record in view.last if view.state == State.RUNNING or record.begun < view.since]
        return f"step {before[-1].step}, after {before[-1]}" if before else "-"
    step = f"step {view.under_way[-1].step}, "
    return step + " > ".join(str(record) for record in view.under_way)


def _about(view: RankView) -> str:
    if view.state is None:
        return f"rank {view.rank} has not come"
    where = f" on {view.host}" if view.host else ""
    word = {"running": "is running"}.get(describe_state(view), describe_state(view))
    return f"rank {view.rank} (pid {view.pid}{where}) {word} in {describe_actions(view)}"

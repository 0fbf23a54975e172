"""Comparison of the settings of all ranks, value by value, in one exchange over the store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import chain, groupby
from typing import Any

from lightning_megatron.comm.rendezvous import Meeting, Store
from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.lightning.comparison.facts import Statement
from lightning_megatron.lightning.comparison.values import NOTHING, Facts, Plain

_LONGEST = 60


class RankComparison:
    """Compares ranks through the store, since process groups of ranks with other settings could hang.

    Facts of the names in ``may_differ`` are left out, see :func:`is_left_out`.
    """

    def __init__(self, store: Store, rank: int, world_size: int, may_differ: Sequence[str]) -> None:
        self._meeting = Meeting(store, rank, world_size, "comparison")
        self._may_differ = tuple(may_differ)

    def compare(self, statement: Statement) -> None:
        """Compare the statements of all ranks. Every rank must call this.

        Raises:
            ConfigError: on all ranks, with every difference and the ranks that have each value.
        """
        groups = {"": statement.shared, **statement.within}
        text = json.dumps({"groups": groups, "may_differ": self._may_differ})
        if found := json.loads(self._meeting.judged(text, _judge)):
            self._meeting.part()
            raise_if_any(Problem(argument, value, reason, tuple(nearest)) for argument, value, reason, nearest in found)


Difference = tuple[list[str], Plain, str]
"""Names of a setting, which may have several (a field of a configuration that is also a hyper-parameter); the value of
the first rank; the ranks that have each value."""


def differences(facts: Mapping[int, Facts]) -> list[Difference]:
    """Find the facts that differ between ranks."""
    found: dict[tuple[str, tuple[str, ...]], Difference] = {}
    for name in dict.fromkeys(name for of_rank in facts.values() for name in of_rank):
        values = {rank: of_rank.get(name, NOTHING) for rank, of_rank in facts.items()}
        ranks: dict[str, list[int]] = {}
        for rank, value in values.items():
            ranks.setdefault(repr(value), []).append(rank)
        if len(ranks) > 1:
            first, *others = ranks.items()
            reason = (
                f"on {rank_ranges(first[1])}, but {' and '.join(f'{_short(v)} on {rank_ranges(r)}' for v, r in others)}"
            )
            key = name.rsplit(".", 1)[-1], tuple(map(repr, values.values()))
            found.setdefault(key, ([], next(iter(values.values())), reason))[0].append(name)
    return list(found.values())


def is_left_out(name: str, may_differ: Iterable[str]) -> bool:
    """True for the name of a fact that matches one of the patterns, with ``*`` and ``?`` as wildcards."""
    return any(fnmatch(name, pattern) for pattern in may_differ)


def rank_ranges(ranks: Iterable[int]) -> str:
    """Text of some ranks: ``[0, 1, 2, 5]`` -> ``"ranks 0-2, 5"``."""
    listed = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(listed), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(listed) > 1 else ''} {text}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."


def _judge(said: Sequence[str]) -> str:
    """Arguments of a :class:`Problem` for each difference, and of one for ``may_differ``, as JSON; empty if equal."""
    ranks = list(map(cache(json.loads), said))  # most ranks say the same
    groups = [rank["groups"] for rank in ranks]
    allowed = {pattern for rank in ranks for pattern in rank["may_differ"]}
    found: list[Difference] = []
    for group in dict.fromkeys(chain.from_iterable(groups)):
        facts = {rank: its[group] for rank, its in enumerate(groups) if group in its}
        for names, value, reason in differences(facts):
            if compared := [name for name in names if not is_left_out(name, allowed)]:
                found.append((compared, value, reason))
    if not found:
        return json.dumps([])
    names = [name for names, _, _ in found for name in names]
    reason = "all ranks must be given the same; an argument of the strategy names what may differ nevertheless"
    problems: list[Any] = [(names[0], value, reason, ()) for names, value, reason in found]
    return json.dumps([*problems, ("may_differ", ranks[0]["may_differ"], reason, (names,))])

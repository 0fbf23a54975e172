"""Values that schedulers keep for each group of an optimizer, such as ``base_lrs``, carried by names of parameters.

A pipeline stage holds only some of the groups, and numbers them by itself. So these values travel with the settings of
the groups, which stages merge when they save and look up by name when they load. In a checkpoint every list has the
order of the merged groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from lightning_megatron.checkpoint import regrouped

Group = Mapping[str, Any]

_PREFIX = "lr_schedulers."
_PARTS = "_schedulers"  # in a state of torch's SequentialLR and ChainedScheduler
_NOT_BY_GROUP = ("_milestones",)


@dataclass(frozen=True)
class SchedulerStates:
    """States of the schedulers of a run, in which every list with a value for each group can be read and replaced.

    Attributes:
        configs: Lightning's configurations of the schedulers.
        states: their states, from a checkpoint or for one.
    """

    configs: Sequence[LRSchedulerConfig] = ()
    states: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_today(cls, configs: Sequence[LRSchedulerConfig]) -> SchedulerStates:
        """The present states."""
        return cls(configs, [config.scheduler.state_dict() for config in configs])

    def _of(self, optimizer: Optimizer) -> list[int]:
        known = enumerate(self.configs[: len(self.states)])
        return [number for number, config in known if getattr(config.scheduler, "optimizer", None) is optimizer]

    def joined(self, optimizer: Optimizer, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """The groups of an optimizer, each with the values that its schedulers keep for it."""
        found = [dict(group) for group in groups]

        def add(name: str, values: Sequence[Any]) -> Sequence[Any]:
            for group, value in zip(found, values, strict=True):
                group[name] = value
            return values

        for number in self._of(optimizer):
            _changed(self.states[number], len(groups), f"{_PREFIX}{number}", add)
        return found

    def take(self, optimizer: Optimizer, groups: Sequence[Group], count: int) -> list[dict[str, Any]]:
        """Replace lists of ``count`` values by those in other groups, and return these groups without the values."""

        def pick(name: str, values: Sequence[Any]) -> Sequence[Any]:
            return [group[name] for group in groups] if all(name in group for group in groups) else values

        for number in self._of(optimizer):
            self.states[number] = _changed(self.states[number], count, f"{_PREFIX}{number}", pick)
        return [{name: value for name, value in group.items() if not name.startswith(_PREFIX)} for group in groups]

    def regroup(self, optimizer: Optimizer, saved: Sequence[Group], names: Sequence[Sequence[str]]) -> None:
        """Give states of a checkpoint the groups of today; a group that it lacks keeps the values of today.

        Args:
            saved: groups of the optimizer in the checkpoint.
            names: names of the parameters in each of its groups of today.
        """
        known, _ = regrouped(self.joined(optimizer, saved), names)
        today = SchedulerStates.of_today(self.configs).joined(optimizer, [{} for _ in names])
        pairs = zip(today, known, strict=True)
        groups = [{name: found.get(name, value) for name, value in own.items()} for own, found in pairs]
        self.take(optimizer, groups, len(saved))


def _changed(
    state: Mapping[str, Any], count: int, at: str, change: Callable[[str, Sequence[Any]], Sequence[Any]]
) -> dict[str, Any]:
    """A scheduler's state with other values by group; ``change`` gets the name and the values of each list."""
    made = dict(state)
    for name, value in state.items():
        place = f"{at}.{name}"
        if name == _PARTS:
            made[name] = [_changed(part, count, f"{place}.{number}", change) for number, part in enumerate(value)]
        elif isinstance(value, list | tuple) and len(value) == count and name not in _NOT_BY_GROUP:
            made[name] = type(value)(change(place, value))
    return made

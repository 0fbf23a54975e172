"""The report of rules that were tried on a real card: a JSON file that is complete after every rule."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1

HOLDS = "holds"
DIFFERS = "differs"
REFUSED_OTHERWISE = "refused otherwise"
FAILED = "failed"
ENDED = "ended the process"
TOO_LONG = "too long"
SKIPPED = "skipped"
NOT_RUN = "not run"

FAULTS = (DIFFERS, FAILED, ENDED, TOO_LONG)
"""Statuses that make the session fail. A missing or different refusal does not: it is only reported."""


@dataclass
class Rule:
    """A rule and its outcome.

    Attributes:
        expected: the rule in words, or the expected refusal.
        found: the deviation, empty where the rule holds.
        status: one of the words above.
        seconds: time of the rule, its preparation included.
        measured: numbers that the rule recorded, by name.
    """

    expected: str
    found: str = ""
    status: str = NOT_RUN
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)


class Report:
    """Rules by name, and facts about the machine, in a file.

    Args:
        path: the file, which is written at once, so that a path that cannot be written is known before the first rule.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self.rules: dict[str, Rule] = {}
        self.write()

    def write(self) -> None:
        """Write the file atomically: a reader sees the old content or the new one."""
        counts = Counter(rule.status for rule in self.rules.values())
        content = {
            "format": FORMAT,
            **self.facts,
            "summary": dict(sorted(counts.items())),
            "rules": [{"rule": name, **asdict(rule)} for name, rule in self.rules.items()],
        }
        scratch = self.path.with_name(f"{self.path.name}.part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(scratch, self.path)

    def add(self, rules: Mapping[str, str]) -> None:
        """Note rules that will be tried.

        Args:
            rules: the expected outcome by name; names that are known already stay as they are.
        """
        for name, expected in rules.items():
            self.rules.setdefault(name, Rule(expected))
        self.write()

    def end(self, name: str, **outcome: Any) -> None:
        """Note the outcome of a rule; ``outcome`` has fields of :class:`Rule`."""
        rule = self.rules.setdefault(name, Rule(name))
        for key, value in outcome.items():
            setattr(rule, key, value)
        self.write()

    @property
    def done(self) -> list[str]:
        """Names of the rules that have an outcome."""
        return [name for name, rule in self.rules.items() if rule.status != NOT_RUN]

    @property
    def faults(self) -> list[str]:
        """Names of the rules with a status among ``FAULTS``."""
        return [name for name, rule in self.rules.items() if rule.status in FAULTS]

"""Write docs/rows.md from rows.yaml: ``python docs/rows.py``; a test holds that it is up to date."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE = HERE / "rows.md"
STATES = ("yes", "part", "out")
HEAD = """\
<!-- made from rows.yaml by `python docs/rows.py` -->
# What was asked for, row by row

Five documents on training with Megatron's parallelism (Intel's fork of Megatron-LM for Gaudi, its Mixtral example,
BLOOM with GPU migration, NVIDIA's note on Megatron-LM, a test case for clusters) ask for 150 things; 75 features are
those that such programs have, or that none has. *Yes* names the tests that show it, on CPUs and simulated Gaudis unless
said otherwise: no real Gaudi was ever at hand. *Out* has its reason, *part* says what is missing. [What
works](evidence.md) has the devices of each feature, and [clusters](cluster-rows.md) more rows of their own kind.
"""


def entries() -> dict[str, list[dict[str, Any]]]:
    """Rows and features of ``rows.yaml``."""
    found: dict[str, list[dict[str, Any]]] = yaml.safe_load((HERE / "rows.yaml").read_text())
    return found


def page() -> str:
    """docs/rows.md as it must be."""
    found = entries()
    rows = "".join(_line(str(e["row"]), e["priority"], e["item"], *_state(e)) for e in found["rows"])
    features = "".join(_line(e["feature"], *_state(e)) for e in found["features"])
    return (
        f"{HEAD}\n| | all | {' | '.join(STATES)} |\n|---|---|---|---|---|\n"
        f"{_counts('rows', found['rows'])}{_counts('features', found['features'])}\n"
        f"## Rows\n\n| | | | | tests, or the reason |\n|---|---|---|---|---|\n{rows}\n"
        f"## Features\n\n| | | tests, or the reason |\n|---|---|---|\n{features}"
    )


def _counts(name: str, found: Sequence[dict[str, Any]]) -> str:
    states = Counter(entry["state"] for entry in found)
    return _line(name, str(len(found)), *(str(states[state]) for state in STATES))


def _state(entry: dict[str, Any]) -> tuple[str, str]:
    if entry["state"] == "out":
        return "out", entry["reason"]
    tests = ", ".join(f"`{path}`" for path in entry["held"])
    words = f"missing: {entry['lacks']}" if entry["state"] == "part" else entry.get("note")
    return entry["state"], f"{words}: {tests}" if words else tests


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())

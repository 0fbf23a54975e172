"""Write docs/evidence.md from evidence.yaml: ``python docs/evidence.py``; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE = HERE / "evidence.md"
COLUMNS = {"cpu": "CPU parity", "cuda": "CUDA", "hpu": "simulated HPU"}
HEAD = """\
<!-- made from evidence.yaml by `python docs/evidence.py` -->
# What works, and the tests that hold it

*CPU parity*: compared, on several gloo processes, with one process or with another implementation. *CUDA*: run on
that device in November 2026, by the same tests (`make test-cuda`): one H100, which ranks share, over NCCL. CI has none.
*Simulated HPU*: trained on [a device that behaves like a Gaudi](simulated-hpu.md) in CPU memory, which shows that the
right calls are made, and nothing about speed, memory or a chip's arithmetic. *Real Gaudi*: none was ever at hand, so
nothing has been run there.

A "yes" names tests, not a run of them. `make test-all` runs all. `.ci/run` runs the quick and the slow ones, and of the
grids and jobs marked `exhaustive` (all pairs of checkpoint layouts, killed jobs, `make demo`) another part with each
commit; it ends with the features of which tests were left out.
"""


def features() -> list[dict[str, Any]]:
    """The entries of ``evidence.yaml``."""
    found: list[dict[str, Any]] = yaml.safe_load((HERE / "evidence.yaml").read_text())
    return found


def page() -> str:
    """docs/evidence.md as it must be."""
    head = ["", *COLUMNS.values(), "real Gaudi", "tests"]
    lines = [head, ["---"] * len(head), *map(_row, features())]
    return HEAD + "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(entry: dict[str, Any]) -> list[str]:
    words = [_word(entry[name]) for name in COLUMNS]
    return [entry["feature"], *words, "-" if entry["hpu"] is None else "never", _files(entry)]


def _word(value: bool | str | None) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, str(value))  # type: ignore[arg-type]


def _files(entry: dict[str, Any]) -> str:
    return ", ".join(f"`{path}`" for path in entry["evidence"])


if __name__ == "__main__":
    PAGE.write_text(page())

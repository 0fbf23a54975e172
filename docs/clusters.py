"""Write docs/cluster-rows.md from clusters.yaml: ``python docs/clusters.py``; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE = HERE / "cluster-rows.md"
HEAD = """\
<!-- made from clusters.yaml by `python docs/clusters.py` -->
# Clusters, launching, preemption: what there is, and the tests that hold it

[Clusters](clusters.md) tells how to use it. The tests in `tests/clusters` run real programs, Slurm's and Open MPI's;
they are skipped where these are not to be found.

| | | tests, or the reason |
|---|---|---|
"""


def rows() -> list[dict[str, Any]]:
    """The entries of ``clusters.yaml``."""
    found: list[dict[str, Any]] = yaml.safe_load((HERE / "clusters.yaml").read_text())
    return found


def page() -> str:
    """docs/cluster-rows.md as it must be."""
    return HEAD + "".join(f"| {entry['row']} | {_state(entry)} | {_why(entry)} |\n" for entry in rows())


def _state(entry: dict[str, Any]) -> str:
    return str(entry["state"])


def _why(entry: dict[str, Any]) -> str:
    return ", ".join(f"`{path}`" for path in entry["held"]) if "held" in entry else str(entry["reason"])


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write docs/lightning-suite.md from tests/lightning_suite/differences.yaml: ``python docs/lightning_suite.py``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PAGE = HERE / "lightning-suite.md"
SUITE = HERE.parent / "tests" / "lightning_suite"
KINDS = {"directory": "directories", "file": "single files"}
HEAD = """\
<!-- made from tests/lightning_suite/differences.yaml by `python docs/lightning_suite.py` -->
# Lightning's own tests, with our strategy

Lightning's tests of the Trainer run twice: as they are, and with `MegatronStrategy()` wherever a test leaves the
strategy of one CPU to the Trainer. A test that passes as it is and fails with ours differs, and must stand on this page
under its reason. None of them trains with other numbers.

```bash
make lightning-suite LIGHTNING=/tmp/lightning                       # checkpoints are directories, the default
make lightning-suite LIGHTNING=/tmp/lightning SUITE="--one-file"    # single files: save_distributed_checkpoint=False
make lightning-suite LIGHTNING=/tmp/lightning SUITE="core loops"    # some of its folders
```

`/tmp/lightning` is a clone of Lightning's repository at the tag of the installed release.
It runs by hand, since it takes long and its tests are not in this repository;
`--keep` puts the counts of a whole run on this page. What the tests import (`tests/tests_pytorch` needs `cloudpickle`
and more, see Lightning's `requirements/pytorch/test.txt`) and is not installed fails both times, and is not compared.
"""


def entries() -> list[dict[str, Any]]:
    """The entries of ``differences.yaml``."""
    found: list[dict[str, Any]] = yaml.safe_load((SUITE / "differences.yaml").read_text())
    return found


def last_runs() -> dict[str, dict[str, Any]]:
    """The kept counts of runs, by kind of checkpoint; none where no run was kept."""
    path = SUITE / "last-runs.yaml"
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text()) if path.exists() else {}
    return found


def page() -> str:
    """docs/lightning-suite.md as it must be."""
    found, runs = entries(), last_runs()
    ran = [entry for entry in found if not entry.get("left_out")]
    columns = [f"differ, {KINDS[kind]}" for kind in runs]
    table = [["reason", "functions", *columns], ["---"] * (2 + len(runs))]
    for entry in sorted(ran, key=lambda entry: -len(entry["tests"])):
        counts = [str(run["reasons"].get(entry["reason"], 0)) for run in runs.values()]
        table.append([entry["reason"], str(len(entry["tests"])), *counts])
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    said = "".join(f"{_ran(kind, run)}\n" for kind, run in runs.items())
    about = "*Functions* are functions of tests, most of which run with several parameters.\n"
    sections = "".join(_section(entry) for entry in found)
    return f"{HEAD}\n## Reasons\n\n{about}{said}\n{lines}\n{sections.rstrip()}\n"


def _ran(kind: str, run: dict[str, Any]) -> str:
    counts = f"{run['passed']} of {run['tests']} tests pass on both sides, {run['differ']} differ"
    return f"With {KINDS[kind]}, on Lightning {run['lightning']}: {counts}."


def _section(entry: dict[str, Any]) -> str:
    title = entry["reason"][0].upper() + entry["reason"][1:]
    where = f" With {KINDS[entry['only']]} alone." if "only" in entry else ""
    left = " Not run with ours (`--deselect`)." if entry.get("left_out") else ""
    files = groupby(sorted(test.split("::") for test in entry["tests"]), key=lambda test: test[0])
    lines = "".join(_file(path, [name for _, name in tests]) for path, tests in files)
    return f"## {title}\n\n{entry['note']}{where}{left}\n\n{lines}\n"


def _file(path: str, names: Sequence[str]) -> str:
    return f"- `{path.removeprefix('tests_pytorch/')}.py`: {', '.join(f'`{name}`' for name in names)}\n"


if __name__ == "__main__":
    PAGE.write_text(page())

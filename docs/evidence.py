"""Write docs/evidence.md from evidence.yaml: ``python docs/evidence.py``; a test holds that it is up to date.

``python docs/evidence.py --ran REPORT.xml ...`` keeps date, commit and counts of a run of all tests, in last-run.yaml.
``make test-all PYTEST="--junitxml REPORT.xml"`` writes the report; with ``PART=1/4`` it writes that of one part.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from lightning_megatron import families
from lightning_megatron.config.transformer import TransformerConfig

HERE = Path(__file__).parent
PAGE = HERE / "evidence.md"
LAST_RUN = HERE / "last-run.yaml"
SESSIONS = HERE.parent / "tests" / "device" / "test_sessions.py"
COLUMNS = {"cpu": "CPU parity", "cuda": "CUDA", "hpu": "simulated HPU"}
HEAD = """\
<!-- made from evidence.yaml by `python docs/evidence.py` -->
# What works, and the tests that hold it

*CPU parity*: compared, on several gloo processes, with one process or with another implementation. *CUDA*: run on
that device in November 2026, by the same tests (`make test-cuda`): one H100, which ranks share, over NCCL. CI has none.
*Simulated HPU*: trained on [a device that behaves like a Gaudi](simulated-hpu.md) in CPU memory, which shows that the
right calls are made, and nothing about speed, memory or a chip's arithmetic. It behaves as Gaudi's software {eager} on
{product}. Parts of `tests/device/` run as {others} too.
*Real Gaudi*: none was ever at hand, so nothing has been run there.

A "yes" names tests, not a run of them. {ran}
*Held by*: the gate is `make test`, which every change passes (`.ci/run`), on the CPU and on the simulated HPU. It has
the smallest tests that show a feature; `make test-all` has all of them, whole grids and killed jobs too: alone where it
stands behind a name. What needs an extra that is too large for every change has a target of its own.
"""


def features() -> list[dict[str, Any]]:
    """The entries of ``evidence.yaml``, the one about a family once for each of them."""
    entries: list[dict[str, Any]] = yaml.safe_load((HERE / "evidence.yaml").read_text())
    return [each for entry in entries for each in _of_families(entry)]


def _of_families(entry: dict[str, Any]) -> list[dict[str, Any]]:
    if entry["feature"] != "{a family of models}":
        return [entry]
    return [entry | {"feature": name} for name in decoders()]


def decoders() -> list[str]:
    """First lines of the files of all families whose models are decoders like GPT."""
    folder = Path(families.__path__[0])
    paths = (path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py")))
    files = (import_module(".".join((families.__name__, *path.parts))) for path in paths if path.stem != "__init__")
    found = [file for file in files if hasattr(file, "FAMILY") and file.FAMILY.config_class is TransformerConfig]
    return [str(file.__doc__).splitlines()[0].rstrip(".").replace("``", "`") for file in found]


def sessions() -> list[str]:
    """Version and product of every session on simulated HPUs; the first one runs all tests."""
    for node in ast.parse(SESSIONS.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SESSIONS":
            assert isinstance(node.value, ast.Dict)
            names = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return list(dict.fromkeys(" ".join(name.split()[:2]) for name in names))
    raise ValueError(f"{SESSIONS} has no SESSIONS")


def page() -> str:
    """docs/evidence.md as it must be."""
    head = ["", *COLUMNS.values(), "real Gaudi", "held by", "tests"]
    lines = [head, ["---"] * len(head), *map(_row, features())]
    (eager, product), *others = [name.split() for name in sessions()]
    others_in_words = ", ".join(f"{version} on {name}" for version, name in others)
    begin = HEAD.format(eager=eager, product=product, others=others_in_words, ran=ran(last_run()))
    return begin + "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def last_run() -> dict[str, Any]:
    """The entries of ``last-run.yaml``; none where no run was kept."""
    found: dict[str, Any] = yaml.safe_load(LAST_RUN.read_text()) if LAST_RUN.exists() else {}
    return found


def ran(run: Mapping[str, Any]) -> str:
    """A sentence about a run of all tests."""
    if not run:
        return "No run of all tests at once is on record yet."
    counts = ", ".join(f"{run[kind]} {kind}" for kind in ("passed", "skipped", "failed"))
    return f"All tests ran last on {run['date']}, at commit `{run['commit']}`: {counts}."


def read_reports(reports: Sequence[Path], commit: str) -> dict[str, Any]:
    """Date, commit and counts of a run of pytest.

    Args:
        reports: JUnit XML of each part.
        commit: hash of what ran.
    """
    suites = [suite for report in reports for suite in ElementTree.parse(report).getroot().iter("testsuite")]
    kinds = ("tests", "failures", "errors", "skipped")
    count = {kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in kinds}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    date = min(str(suite.get("timestamp")) for suite in suites)[:10]
    return {"date": date, "commit": commit, "passed": passed, "skipped": count["skipped"], "failed": failed}


def _row(entry: dict[str, Any]) -> list[str]:
    words = [_word(entry[name]) for name in COLUMNS]
    target = f"`{entry['target']}`" if "target" in entry else "gate"
    return [entry["feature"], *words, "-" if entry["hpu"] is None else "never", target, _files(entry)]


def _word(value: bool | str | None) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, str(value))  # type: ignore[arg-type]


def _files(entry: dict[str, Any]) -> str:
    alone = entry.get("beyond", ())
    return ", ".join(f"`{path}`{' (`make test-all`)' if path in alone else ''}" for path in entry["evidence"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ran", type=Path, nargs="+", metavar="REPORT.xml", help="reports of a run of all tests, at this commit"
    )
    options = parser.parse_args()
    if options.ran:
        words = ["git", "-C", str(HERE), "rev-parse", "--short=10", "HEAD"]
        commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        LAST_RUN.write_text(yaml.safe_dump(read_reports(options.ran, commit), sort_keys=False))
    PAGE.write_text(page())

"""Write the table of evidence into README.md: ``python docs/evidence.py``; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- evidence: made by docs/evidence.py -->", "<!-- evidence: end -->"
COLUMNS = {"cpu": "CPU parity", "cuda": "CUDA", "hpu": "simulated HPU"}


def features() -> list[dict[str, Any]]:
    """The entries of ``evidence.yaml``."""
    found: list[dict[str, Any]] = yaml.safe_load((HERE / "evidence.yaml").read_text())
    return found


def table() -> str:
    """Markdown, one row a feature."""
    head = ["", *COLUMNS.values(), "real Gaudi", "evidence"]
    rows = [_row(entry) for entry in features()]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(entry: dict[str, Any]) -> list[str]:
    words = [_word(entry[name]) for name in COLUMNS]
    return [entry["feature"], *words, "-" if entry["hpu"] is None else "never", _files(entry)]


def readme() -> str:
    """README.md with the table as it must be."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _word(value: bool | str | None) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, str(value))  # type: ignore[arg-type]


def _files(entry: dict[str, Any]) -> str:
    return ", ".join(f"`{path}`" for path in entry["evidence"])


if __name__ == "__main__":
    README.write_text(readme())

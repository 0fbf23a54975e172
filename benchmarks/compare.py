"""Lets contestants of ``peer.py`` train in turns and compares their medians.

    python benchmarks/compare.py "--peer ours" "--peer hf" --rounds 8

    python benchmarks/compare.py "--peer ours" "PYTHONPATH=../before --peer ours"  # with another checkout

Words such as NAME=VALUE before its arguments are in a contestant's environment. The first contestant is the one that
the others are compared with. Ratios are medians of those of each round; rounds alternate, so that a busy machine slows
all alike. Figures: tokens/s (wall), tokens per CPU second of rank 0, peak resident MB of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

HERE = Path(__file__).parent
LAST_WORDS = 4000  # characters


class Contestant:
    """A process that trains one round whenever it is told to."""

    def __init__(self, arguments: str) -> None:
        self.name = arguments
        self.rounds: list[dict[str, float]] = []
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        words = shlex.split(arguments)
        given = dict(word.split("=", 1) for word in takewhile(lambda word: not word.startswith("-"), words))
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **given}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), *words[len(given) :]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has died: what it said follows below
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ROUND "):
                self.rounds.append(json.loads(line.removeprefix("ROUND ")))
                return
        code = self._process.wait()
        raise RuntimeError(f"{self.name}: ended with exit code {code} and no report\n{self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-LAST_WORDS:]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    @property
    def tokens(self) -> float:
        """Of a step."""
        return self.rounds[0]["tokens"]

    def median(self, what: str) -> float:
        return statistics.median(r[what] for r in self.rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestants", nargs="+")
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds of each, after one to warm up")
    args = parser.parse_args()
    contestants = [Contestant(c) for c in args.contestants]
    try:
        for _ in range(args.rounds + 1):
            for contestant in contestants:
                contestant.run()
    finally:
        for contestant in contestants:
            contestant.stop()
    first = contestants[0]
    print("| contestant | tokens/s | tokens/CPU s | peak MB | wall ratio | CPU ratio |")
    print("|---|---|---|---|---|---|")
    for c in contestants:
        pairs = list(zip(c.rounds[1:], first.rounds[1:], strict=True))
        wall = statistics.median(a["wall"] / b["wall"] for a, b in pairs)
        cpu = statistics.median(a["cpu"] / b["cpu"] for a, b in pairs)
        print(
            f"| {c.name} | {c.tokens / c.median('wall'):.0f} | {c.tokens / c.median('cpu'):.0f}"
            f" | {max(r['peak_mb'] for r in c.rounds):.0f} | {wall:.2f} | {cpu:.2f} |"
        )


if __name__ == "__main__":
    main()

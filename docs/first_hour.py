"""Write docs/first-hour-cuda.md from ``benchmarks/first_hour_steps.py``: ``python docs/first_hour.py``.

A test holds that the page is up to date.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "first-hour-cuda.md"
BENCHMARKS = HERE.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
PARTS, TABLE = run_path(str(BENCHMARKS / "first_hour_parts.py")), run_path(str(BENCHMARKS / "first_hour_steps.py"))
TESTS = "`tests/trainer/commands/test_first_hour.py`"
HEAD = """\
<!-- made from benchmarks/first_hour_steps.py by `python docs/first_hour.py` -->
# The first hour on CUDA cards

**No step of this page has run on CUDA yet.** [On GPUs](gpu.md) says what has run on one card, and no state ever ran on
several. If you have a machine with cards, one command tries what matters first:

```bash
make first-hour
```

It takes about an hour on eight cards, less on fewer: a step that needs more cards says so and is skipped. A step that
fails or runs out of time does not stop the others, and Ctrl-C leaves a report of what has run. On CPUs the same steps
run with tiny models. They show that commands and judges work, and nothing about a card:

```bash
python benchmarks/first_hour.py --device cpu --cards 2
python benchmarks/first_hour.py --only kill stop
```

## What to send back

The command names the file at its end: `first-hour/DATE/first-hour.zip`. Attach it to an issue of the project with the
title "first hour on CUDA". It has `report.md` with versions, cards, and for each step the verdict, the seconds and what
was seen, and the logs of all commands. Of the environment it has variables whose names begin with one of
{allowed}. Logs contain the names of the machine
and its paths: look through them before you send them.

## Steps

The last column has the numbers of findings of a review, which was made without a card: A is what breaks a first run, B
numbers, C speed and memory. Minutes are limits.

| step | minutes | cards | must be seen | finding |
|---|---|---|---|---|
"""
NODES = """
## Two machines

Run this on each of them, from the same path, with `--node-rank 1` on the second; `10.0.0.1` stands for the address of
the first one.

```bash
python benchmarks/first_hour.py --nodes 2 --node-rank 0 --master 10.0.0.1
```

Only the step "several nodes" runs then. It asks for the address that the machine's name resolves to, trains on one
card, and then on all cards of both machines. The first loss must be the same. Only machine 0 can compare it, since the
other logs none; send both reports.

## How it was checked

| | how |
|---|---|
| steps for a CPU too | run on two CPU processes with gloo; four ranks: on four; machines: two torchruns |
| arguments of all commands, for eight cards and for two machines | read by the commands' own parsers, by {tests} |
| {cuda} | never run: they need a card |
| the report, time limits, Ctrl-C, what goes into the archive | by {tests} |

## Commands

As they run on eight cards. `{{here}}` is the command's folder, `{{step}}` is the folder of its step, `{{data}}` has the
tokens of `lightning-megatron demo-data`, and `{{bin}}` is the folder of Python.
"""


def page() -> str:
    """docs/first-hour-cuda.md as it must be."""
    steps = TABLE["STEPS"]
    cuda = ", ".join(f'"{step.name}"' for step in steps if not step.on_cpu)
    allowed = ", ".join(f"`{name}`" for name in PARTS["ALLOWED"])
    rows = [f"| {s.name} | {s.minutes:g} | {_cards(s)} | {s.seen} | {s.finding} |\n" for s in steps]
    return (
        HEAD.format(allowed=allowed)
        + "".join(rows)
        + NODES.format(cuda=cuda, tests=TESTS)
        + "".join(map(_commands, steps))
    )


def _cards(step: Any) -> str:
    return f"{step.cards} on each of {step.nodes} machines" if step.nodes > 1 else str(step.cards)


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[\w{}/.:=+,-]+", word) else shlex.quote(word)


def _commands(step: Any) -> str:
    setup = TABLE["Setup"](nodes=step.nodes, master="10.0.0.1")
    lines = []
    for name, command in step.commands(setup).items():
        variables = [f"{key}={value}" for key, value in command.environment.items()]
        lines.append(f"# {name}\n" + " ".join([*variables, *map(_quoted, command.words)]))
    return f"\n{step.name}:\n\n```text\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())

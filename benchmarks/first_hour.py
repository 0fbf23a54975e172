"""The first hour on CUDA cards: runs each step of ``first_hour_steps.py``, judges it, and writes one report.

    python benchmarks/first_hour.py                                     # `make first-hour`; all cards of this machine
    python benchmarks/first_hour.py --only kill stop                    # some steps
    python benchmarks/first_hour.py --device cpu --cards 2              # tiny models, processes on the CPU
    python benchmarks/first_hour.py --nodes 2 --node-rank 0 --master A  # on each node, A the address of the first one

A step that fails or runs out of time does not stop the others. Each run has a folder below ``--out``: ``report.md`` is
complete after every step, also after Ctrl-C, and ``first-hour.zip`` has it and all logs. Of the environment, only
variables of known software are written down.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from first_hour_parts import ALLOWED, Command, Findings, Ran, Setup, Step, ours
from first_hour_steps import STEPS

from lightning_megatron.recorder.diagnosis import diagnose
from lightning_megatron.recorder.reading import RankView, read_run, runs_below

ROOT = Path(__file__).parents[1]
KEPT = {".log", ".md", ".csv", ".json", ".txt"}
"""Ends of the names of files that are sent back; checkpoints and token files are not."""
LARGEST = 20 << 20
SEND = """\
Send back {archive}: open an issue of the project with the title "first hour on CUDA", and attach the file. It holds the
report, the logs of all steps, and the names of this machine and its paths, which logs contain: look through it first.
"""


@dataclass
class Result:
    """Verdict on a step."""

    step: Step
    verdict: str = "not run"
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)
    lines: list[str] = field(default_factory=list)
    tail: str = ""


class Hour:
    """Runs steps in a folder, and keeps their results.

    Args:
        setup: device, cards and nodes.
        folder: where logs and the report go.
        steps: steps in order.
        common: where the jobs write. All ranks must be given the same settings, so it is the same path on all nodes.
    """

    def __init__(self, setup: Setup, folder: Path, steps: Sequence[Step], common: Path | None = None) -> None:
        self.setup, self.folder = setup, folder.resolve()
        self.common = common.resolve() if common else self.folder
        # A folder of each node's own, but under one path: nodes that share a file system would write it together.
        self._data = Path(tempfile.gettempdir()) / f"first-hour-{os.getuid()}" if common else self.folder / "data"
        self.results = [Result(step) for step in steps]
        self.facts = facts(setup)

    def run(self) -> bool:
        """Run all steps; False if one failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for result in self.results:
                result.verdict = self._reason_to_skip(result.step) or "interrupted"
                print(f"{result.step.name} ...", end=" ", flush=True)
                if result.verdict == "interrupted":
                    self._judge(result)
                print(result.verdict, *(f"\n    {text}" for text in result.findings.wrong), flush=True)
                self.write()
        finally:
            self.write()
        return all(result.verdict != "FAILED" for result in self.results)

    def write(self) -> None:
        """The report, and the archive to send back."""
        report = self.folder / "report.md"
        report.write_text(self.report())
        with zipfile.ZipFile(self.archive, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(self.folder.rglob("*")):
                if path.suffix in KEPT and path.stat().st_size <= LARGEST and self._data not in path.parents:
                    archive.write(path, path.relative_to(self.folder))

    @property
    def archive(self) -> Path:
        """The file to send back."""
        return self.folder / "first-hour.zip"

    def report(self) -> str:
        """Facts, a table of verdicts, and a section for each step that ran."""
        head = ["# The first hour on CUDA", "", *(f"- {name}: {text}" for name, text in self.facts.items()), ""]
        table = ["| step | finding | verdict | seconds |", "|---|---|---|---|"]
        table += [f"| {r.step.name} | {r.step.finding} | {r.verdict} | {r.seconds:.0f} |" for r in self.results]
        ran = (line for result in self.results if result.lines for line in _section(result))
        return "\n".join([*head, *table, *ran]) + "\n"

    def _reason_to_skip(self, step: Step) -> str:
        if step.nodes > self.setup.nodes:
            return f"skipped: needs {step.nodes} nodes; run with --nodes on each of them"
        if step.cards > self.setup.cards:
            return f"skipped: needs {step.cards} cards"
        return "" if step.on_cpu or self.setup.device != "cpu" else "skipped: needs CUDA"

    def _judge(self, result: Result) -> None:
        begun, step, ran = time.monotonic(), result.step, dict[str, Ran]()
        end = begun + step.minutes * 60
        try:
            commands = step.commands(self.setup)
            if any("{data}" in word for command in commands.values() for word in command.words):
                self._make_data(end)
            for name, command in commands.items():
                here = self._of(step) / name
                result.lines.append(f"{name}: `{self.line(command, here)}`")
                ran[name] = self._run(command, here, end)
                result.tail = ran[name].output[-3000:]
                status = ran[name].status
                said = "out of time" if status is None else f"exit status {status}"
                result.findings.expect(status is not None if command.blow else status == 0, f"{name}: {said}")
            step.judge(ran, self.setup, result.findings)
        except Exception as error:  # what a judge stumbles over is a finding, too
            result.findings.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            result.seconds = time.monotonic() - begun
        result.verdict = "FAILED" if result.findings.wrong else "passed"

    def _make_data(self, end: float) -> None:
        if not (self._data / "corpus_text_document.idx").exists():
            self._run(ours("demo-data", "--output", "{data}"), self._data, end)

    def _of(self, step: Step) -> Path:
        return self.common / step.name.replace(" ", "-")

    def _words(self, command: Command, here: Path) -> list[str]:
        paths = {"here": here, "step": here.parent, "data": self._data, "bin": Path(sys.executable).parent}
        return [re.sub(r"\{(here|step|data|bin)\}", lambda match: str(paths[match[1]]), word) for word in command.words]

    def line(self, command: Command, here: Path) -> str:
        """The command as one would type it."""
        variables = [f"{name}={value}" for name, value in command.environment.items()]
        return " ".join([*variables, shlex.join(self._words(command, here))])

    def _run(self, command: Command, here: Path, end: float) -> Ran:
        logs = self.folder / here.relative_to(self.common) if here.is_relative_to(self.common) else self.folder
        for folder in (here, logs):
            folder.mkdir(parents=True, exist_ok=True)
        log = logs / "output.log"
        blown: float | None = None
        with log.open("wb") as file, _started(self._words(command, here), command, file.fileno()) as process:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                if command.blow and blown is None and (victim := _in_third_step(here, self.setup.victim)):
                    os.kill(victim.pid, command.blow)
                    blown = time.monotonic()
            status = process.poll()
        took = None if blown is None or status is None else round(time.monotonic() - blown, 1)
        runs = runs_below(here) if command.blow else []
        culprits = tuple(diagnose(read_run(runs[0], live=False)).culprits) if runs else ()
        return Ran(status, log.read_text(errors="replace"), here, culprits, took)


@contextmanager
def _started(words: Sequence[str], command: Command, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a session of its own, all of which has ended afterwards."""
    environment = os.environ | dict(command.environment)
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _in_third_step(folder: Path, rank: int) -> RankView | None:
    """That rank of the run below a folder, once it has come so far."""
    runs = runs_below(folder)
    view = next((view for view in (read_run(runs[0]) if runs else []) if view.rank == rank), None)
    return view if view is not None and any(record.step >= 2 for record in view.last) else None


def _section(result: Result) -> Iterator[str]:
    step = result.step
    yield from ("", f"## {step.name}: {result.verdict}", "", f"Must be seen: {step.seen}.", "")
    yield from (f"- {line}" for line in result.lines)
    yield from (f"- seen: {text}" for text in result.findings.seen)
    yield from (f"- **wrong**: {text}" for text in result.findings.wrong)
    if result.verdict != "passed" and result.tail:
        yield from ("", "~~~text", result.tail.replace("~~~", ""), "~~~")


def facts(setup: Setup) -> dict[str, str]:
    """Versions, and variables of known software."""
    names = ("lightning_megatron", "lightning", "torch", "triton", "numpy")
    found = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "python": platform.python_version()}
    for name in names:
        with suppress(ImportError):
            found[name] = version(name)
    found |= {"device": f"{setup.device}, {setup.cards} cards", "system": platform.platform()}
    if torch.cuda.is_available():
        found["CUDA"], found["NCCL"] = str(torch.version.cuda), str(torch.cuda.nccl.version())
        found["card"] = torch.cuda.get_device_name(0)
    found["commit"] = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    shown = (f"`{name}={value}`" for name, value in sorted(os.environ.items()) if name.startswith(ALLOWED))
    return found | {"variables": ", ".join(shown) or "none"}


def _said(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "not known"


def main(argv: Sequence[str] | None = None) -> int:
    """Run steps; returns the exit status: 0, 1 if a step failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cards", type=int, help="devices (all of this machine; on a CPU, 2 processes)")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP", help="some steps")
    parser.add_argument("--nodes", type=int, default=1, help="machines: only steps that need several run")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this machine")
    parser.add_argument("--master", default="", metavar="ADDRESS", help="address of machine 0")
    parser.add_argument(
        "--out", type=Path, default=Path("first-hour"), help="folder for a folder with the report (first-hour)"
    )
    args = parser.parse_args(argv)
    cards = args.cards or (2 if args.device == "cpu" else torch.cuda.device_count())
    if cards < 1:
        parser.error("this machine has no CUDA card that torch sees; --device cpu runs tiny steps without one")
    if args.nodes > 1 and not args.master:
        parser.error(f"--nodes {args.nodes}: needs --master, the address of machine 0")
    setup = Setup(args.device, cards, args.nodes, args.node_rank, args.master)
    chosen = [step for step in STEPS if (step.name in args.only if args.only else step.nodes > 1 or args.nodes == 1)]
    common = args.out / "nodes" if args.nodes > 1 else None
    hour = Hour(setup, args.out / time.strftime(f"%Y%m%d-%H%M%S-{args.node_rank}"), chosen, common)
    try:
        return 0 if hour.run() else 1
    except KeyboardInterrupt:
        return 130
    finally:
        print(SEND.format(archive=hour.archive))


if __name__ == "__main__":
    raise SystemExit(main())

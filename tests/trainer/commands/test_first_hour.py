"""The first hour on CUDA cards (docs/first-hour-cuda.md): its commands, its judges and its report, on CPU processes."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from torch.distributed.run import get_args_parser

from lightning_megatron.tools.cli.doctor.command import doctor_parser
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.ops import ops_parser
from lightning_megatron.tools.cli.verify import verify_parser

sys.path.append(str(ROOT / "benchmarks"))

import first_hour
from first_hour import Hour
from first_hour_parts import Command, Findings, Ran, Setup, Step
from first_hour_steps import STEPS

PARSERS: dict[str, Callable[[], ArgumentParser]] = {"doctor": doctor_parser, "ops": ops_parser, "verify": verify_parser}
CPU = Setup("cpu", 2)


def python(text: str) -> Command:
    return Command(("{bin}/python", "-c", text))


def step(name: str, text: str, **more: Any) -> Step:
    """A step of one command, which is a Python program."""
    fields = {"minutes": 1, "cards": 1, "finding": "", "seen": ""} | more
    return Step(name, **fields, commands=lambda _: {"it": python(text)})


def ours(words: tuple[str, ...]) -> None:
    """Arguments of a command of ours, read by its own parser."""
    if words[0] in PARSERS:
        PARSERS[words[0]]().parse_args(words[1:])
    else:
        assert words[0] == "fit"
        with redirect_stdout(StringIO()):
            assert main([word.replace("{", "").replace("}", "") for word in words] + ["--print_config"]) == 0


def understood(command: Command) -> None:
    """Refuse a command that its program would refuse."""
    program, *words = command.words
    if program.endswith("lightning-megatron"):
        ours(tuple(words))
    elif program.endswith("torchrun"):
        options = get_args_parser().parse_args(words)
        assert options.module
        assert importlib.util.find_spec(options.training_script)
        ours(tuple(options.training_script_args))
    elif program.endswith("python") and words[0] != "-m":
        text = (ROOT / words[0]).read_text()
        assert all(f'"{word}"' in text for word in words if word.startswith("--"))
    elif program.endswith("python"):
        assert words[1] == "pytest"
        assert importlib.util.find_spec(words[words.index("-p") + 1])
        assert (ROOT / words[-1]).is_dir()
    else:
        assert program in ("nvidia-smi", "sh")


def every_command() -> Iterator[Any]:
    """Those for eight cards, and for two machines of eight."""
    for each in STEPS:
        for name, command in each.commands(Setup(nodes=each.nodes, master="10.0.0.1")).items():
            is_dear = "fit" in command.words and (each.name, name) != ("one", "cpu")
            yield pytest.param(command, id=f"{each.name}-{name}", marks=[pytest.mark.slow] if is_dear else [])


@pytest.mark.parametrize("command", list(every_command()))
def test_every_command_is_understood_by_its_program(command: Command) -> None:
    understood(command)


def test_a_failing_step_stops_no_other_and_the_archive_has_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against the steps' own exit statuses; one more runs out of time, and one asks for more cards."""
    monkeypatch.setenv("HUB_TOKEN", "a secret of mine")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    steps = [
        step("fails", "print('a last word'); raise SystemExit(3)"),
        step("hangs", "import time; print('begun', flush=True); time.sleep(1e6)", minutes=0.02),
        step("large", "raise SystemExit(1)", cards=8),
        step("broken", "pass", judge=lambda ran, setup, findings: json.loads(ran["it"].output)),
        next(each for each in STEPS if each.name == "ops"),
    ]
    hour = Hour(CPU, tmp_path, steps)
    assert not hour.run()
    verdicts = [result.verdict for result in hour.results]
    assert verdicts == ["FAILED", "FAILED", "skipped: needs 8 cards", "FAILED", "passed"]
    report = (tmp_path / "report.md").read_text()
    for said in ("exit status 3", "a last word", "out of time", "JSONDecodeError", "`NCCL_DEBUG=WARN`", "8 ops"):
        assert said in report
    with zipfile.ZipFile(hour.archive) as archive:
        assert "report.md" in archive.namelist()
        assert "ops/ops/output.log" in archive.namelist()
        assert not any(b"a secret of mine" in archive.read(name) for name in archive.namelist())


def test_an_interrupted_hour_leaves_a_report(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hour = Hour(CPU, tmp_path, [step("first", "pass"), step("second", "pass", judge=interrupt), step("third", "pass")])
    with pytest.raises(KeyboardInterrupt):
        hour.run()
    assert [result.verdict for result in hour.results] == ["passed", "interrupted", "not run"]
    assert all(f"| {r.step.name} |  | {r.verdict} |" in (tmp_path / "report.md").read_text() for r in hour.results)
    assert hour.archive.exists()


def judged(name: str, ran: dict[str, Ran], setup: Setup = CPU) -> Findings:
    findings = Findings()
    next(each for each in STEPS if each.name == name).judge(ran, setup, findings)
    return findings


@pytest.mark.parametrize("name", ["kill", "stop"])
def test_a_hang_must_be_blamed_on_the_rank_that_was_struck(name: str, tmp_path: Path) -> None:
    right = Ran(1, "First to blame: rank 1 (pid 7)", tmp_path, (1,), 4.0)
    assert not judged(name, {"struck": right}).wrong
    for wrong in (
        replace(right, output="First to blame: rank 0 (pid 7)"),
        replace(right, culprits=(0,)),
        replace(right, after_blow=500.0),
        replace(right, after_blow=None),
    ):
        assert len(judged(name, {"struck": wrong}).wrong) == 1


@pytest.mark.parametrize(("loss", "is_right"), [("8.001", True), ("8.1", False), ("nan", False), ("", False)])
def test_a_first_loss_must_be_that_of_one_card(loss: str, is_right: bool, tmp_path: Path) -> None:
    ran = {}
    for name, value in {"a2a": "8.0", "p2p": loss}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"step,train_loss\n0,{value}\n1,7.0\n" if value else "step\n0\n")
        ran[name] = Ran(0, "", tmp_path / name)
    assert bool(judged("context parallelism", ran).wrong) != is_right


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "kill"])
def test_a_step_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Held against the product's own record: the step itself kills a rank, and compares whom the job blames."""
    assert first_hour.main(["--device", "cpu", "--cards", "2", "--out", str(tmp_path), "--only", name]) == 0
    (report,) = tmp_path.glob("*/report.md")
    assert f"## {name}: passed" in report.read_text()

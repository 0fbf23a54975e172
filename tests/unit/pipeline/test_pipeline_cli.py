"""``lightning-megatron schedule``: what it prints, and how it refuses."""

import signal
import subprocess
import sys

import pytest

from lightning_megatron.pipeline.schedule import interleaved, zero_bubble
from lightning_megatron.tools.cli.main import main
from lightning_megatron.tools.cli.schedule import parse_costs, schedule_command
from tests.schedules import parse_schedule


def test_numbers_and_picture(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert schedule_command(["--pp", "4", "--vpp", "2", "--micro-batches", "8", "--png", str(path)]) == 0
    out = capsys.readouterr().out
    assert "interleaved, pp=4, vpp=2, 8 micro-batches" in out
    assert "step time         28.5\n" in out
    assert "bubble            18.75% of the computing time (theory for equal stages and free messages: 18.75%)" in out
    assert "peak activations  5.5 4.5 3.5 2.5" in out
    assert "complete, in order, free of deadlock" in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_schedules_are_compared_for_one_model(capsys) -> None:
    """1F1B and interleaved have the same work: chunks of a rank share its time, messages cost what they cost."""
    assert schedule_command(["--pp", "4", "--micro-batches", "8"]) == 0
    assert "step time         33\n" in capsys.readouterr().out  # interleaved: 28.5, above
    costs = parse_costs("F=4,C=1", 2, vpp=2)
    assert [costs.of(kind, 3) for kind in "FBIW"] == [2.0, 1.0, 0.5, 0.5]
    assert costs.communication == 1
    assert parse_costs("F=1:2:3:4", 2, vpp=2).of("F", 3) == 4


def test_nobody_reads_to_the_end() -> None:
    words = [
        sys.executable,
        "-m",
        "lightning_megatron.tools.cli.main",
        *["schedule", "--pp", "4", "--micro-batches", "4"],
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 128 + signal.SIGPIPE


def test_csv_reads_back(capsys) -> None:
    assert schedule_command(["--pp", "2", "--vpp", "2", "--micro-batches", "5", "--csv"]) == 0
    assert parse_schedule(capsys.readouterr().out) == interleaved(2, 2, 5)
    assert schedule_command(["--pp", "2", "--micro-batches", "5", "--schedule", "zero-bubble", "--csv"]) == 0
    assert parse_schedule(capsys.readouterr().out) == zero_bubble(2, 5)


def test_costs(capsys) -> None:
    words = "--pp 2 --micro-batches 2 --schedule zero-bubble --costs F=2,I=2,W=1:1,C=0.5"
    assert schedule_command(words.split()) == 0
    assert "theory for equal stages and free messages: 30.00%" in capsys.readouterr().out
    costs = parse_costs("F=1:2,I=3,W=1", 2)
    assert [costs.of(k, 1) for k in "FBIW"] == [2.0, 4.0, 3.0, 1.0]


def test_forward_only_and_help(capsys) -> None:
    assert schedule_command(["--pp", "2", "--vpp", "2", "--micro-batches", "3", "--forward-only"]) == 0
    assert "step time         3.5\n" in capsys.readouterr().out
    assert main(["schedule", "--help"]) == 0
    assert "--micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("--pp 2", "error: the following arguments are required: --micro-batches"),
        ("--pp two --micro-batches 2", "error: argument --pp: invalid int value: 'two'"),
        ("--pp 2 --micro-batches 2 --schedule 1f1v", "no such schedule; nearest valid: 1f1b"),
        ("--pp 0 --micro-batches 2", "--pp=0: a size must be at least 1"),
        ("--pp 2 --micro-batches 0", "--micro-batches=0: a size must be at least 1"),
        ("--pp 1 --vpp 2 --micro-batches 2 --forward-only", "vpp=2: interleaved chunks need a pipeline"),
        ("--pp 2 --micro-batches 2 --costs Q=1", "--costs='Q=1': no such cost"),
        ("--pp 2 --micro-batches 2 --costs F=x", "--costs='F=x': a cost is a number"),
        ("--pp 2 --micro-batches 2 --costs F=nan", "a time cannot be negative or infinite"),
        ("--pp 2 --micro-batches 2 --costs F=1:2:3", "3 numbers for 2 stages (pp x vpp); nearest valid: 1, 2"),
        ("--pp 2 --micro-batches 2 --costs C=1:2", "every message takes the same time"),
        ("--pp 2 --micro-batches 2 --png missing/folder/out.png", "error: [Errno 2]"),
    ],
)
def test_refusals(words: str, fragment: str, capsys) -> None:
    assert main(["schedule", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert fragment in err
    assert "Traceback" not in err

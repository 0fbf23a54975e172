"""Sessions on real cards, of which there are none here: the simulation passes for one, and deviates on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_gaudi as hpu

from lightning_megatron.machine.job_environment import own_environment

HERE = Path(__file__).parent
LIMIT = 45

DEVIATIONS = """
import os, signal, time
import torch
from habana_frameworks.torch import core
from habana_frameworks.torch.hpex.normalization import FusedClipNorm
from habana_frameworks.torch.hpex.optimizers import FusedAdamW

state, norm, adamw = torch.hpu.get_rng_state, FusedClipNorm.clip_norm, FusedAdamW.__init__

def refuse_otherwise(self, *args, lr=1e-3, **kwargs):
    if lr < 0:
        raise TypeError("negative rates are not known here")
    adamw(self, *args, lr=lr, **kwargs)

torch.hpu.get_rng_state = lambda device="hpu": state()
FusedAdamW.__init__ = refuse_otherwise
FusedClipNorm.clip_norm = lambda self, parameters: 2 * norm(self, parameters)
torch.random.fork_rng = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGSEGV)
core.iter_mark_step = lambda *args: time.sleep(3600)
"""
RULES = (
    "the_generator_is_its_own", "what_adamw_refuses", "clipping_by_the_local_norm", "forked_generators",
    "steps_are_counted", "files_come_back", "memory_is_counted", "memory_of_tensors",
    "test_reduce_scatter_of_a_list", "all_cards_together",
)  # fmt: skip


def session(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A session on real cards in a folder."""
    plugin = folder / "habana_torch_plugin-1.24.0.1007.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.24.0.1007\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        str(HERE),
        "--hpu-real",
        "--hpu-report",
        str(folder / "report.json"),
    ]
    env = own_environment(PYTHONPATH=path) | variables
    return subprocess.run(
        [*command, *words], cwd=HERE.parents[1], env=env, capture_output=True, text=True, timeout=1100, check=False
    )


def as_real(folder: Path) -> dict[str, str]:
    """Variables of a session whose simulated cards pass for real ones."""
    path = os.pathsep.join([str(hpu.SITE), str(folder), os.environ.get("PYTHONPATH", "")])
    return {hpu.PROFILE: "1.24", hpu.DEVICES: "2", hpu.DEVICE_NAME: "GAUDI3", hpu.AS_REAL: "1", "PYTHONPATH": path}


@pytest.mark.exhaustive
def test_a_report_of_a_card_that_deviates(tmp_path: Path) -> None:
    (tmp_path / "deviating.py").write_text(DEVIATIONS)
    words = ("-p", "deviating", "--hpu-limit", str(LIMIT), "-k", " or ".join(RULES))
    done = session(tmp_path, *words, PT_HPU_LAZY_MODE="0", **as_real(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    rules = {entry["rule"].split("::")[-1]: entry for entry in report["rules"]}
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]

    def outcome(name: str) -> tuple[str, Any]:
        return rules[name]["status"], rules[name]["found"]

    assert outcome("test_the_generator_is_its_own") == ("refused otherwise", "not refused")
    assert "hpu get_rng_state supports only device 0" in rules["test_the_generator_is_its_own"]["expected"]
    refusals = [entry for name, entry in rules.items() if name.startswith("test_what_adamw_refuses")]
    assert [entry["status"] for entry in refusals] == ["refused otherwise", "holds", "holds"]
    assert refusals[0]["found"] == "refused with TypeError: negative rates are not known here"
    status, found = outcome("test_clipping_by_the_local_norm[0.5]")
    assert status == "differs"
    assert "assert" in found
    assert outcome("test_forked_generators_are_the_devices") == (
        "ended the process",
        "the process ended with signal SIGSEGV",
    )
    status, found = outcome("test_steps_are_counted_and_said_once_to_do_nothing")
    assert (status, found) == ("too long", f"no answer after {LIMIT} s; the process was ended")
    assert rules["test_steps_are_counted_and_said_once_to_do_nothing"]["seconds"] >= LIMIT
    for name in (
        "test_files_come_back_to_where_they_shall[hpu]",
        "test_reduce_scatter_of_a_list",
        "test_all_cards_together",
    ):
        assert outcome(name) == ("holds", ""), name
    assert rules["test_all_cards_together"]["measured"] == {"modules of ranks": ["0", "1"]}
    assert rules["test_memory_is_counted_under_the_bridges_keys"]["measured"]["memory"]["Limit"] == 128 * 2**30
    assert "test_memory_of_tensors_is_counted_to_the_byte" not in rules  # which only the simulation promises
    assert (report["product"], report["device_count"], report["lazy"]) == ("GAUDI3", 2, False)
    assert report["versions"]["habana-torch-plugin"] == "1.24.0.1007"
    assert report["finished"]
    assert report["summary"]["ended the process"] == report["summary"]["too long"] == 1
    assert "ended the process: " in done.stdout


def test_rules_are_tried_on_a_card_and_reported(tmp_path: Path) -> None:
    done = session(tmp_path, "-k", "what_adamw_refuses", PT_HPU_LAZY_MODE="0", **as_real(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [entry["status"] for entry in report["rules"]] == ["holds"] * 3
    assert all("refused with" in entry["expected"] for entry in report["rules"])
    assert (report["product"], report["finished"]) == ("GAUDI3", True)


def test_without_a_gaudi_it_says_so(tmp_path: Path) -> None:
    done = session(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--hpu-real needs a Gaudi: Gaudi's bridge (habana_frameworks" in done.stderr + done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["finished"] is False

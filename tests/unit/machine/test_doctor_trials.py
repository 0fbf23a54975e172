"""``lightning-megatron doctor --device``: on a CPU, and on simulated Gaudis with one fault each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simulated_gaudi as hpu
from patience import PATIENCE
from torch import Tensor

from lightning_megatron.machine.finding import Finding
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.tools.cli.doctor.op_trials import op_trials
from lightning_megatron.tools.cli.doctor.trials import one_by_one, together

pytestmark = pytest.mark.slow
WORDS = ["--device", "hpu", "--tokens", "16"]


def simulated(*faults: str) -> dict[str, str]:
    """Variables of processes on a simulated Gaudi."""
    path = os.pathsep.join(filter(None, (str(hpu.SITE), os.environ.get("PYTHONPATH"))))
    return {hpu.PROFILE: "1.24", hpu.FAULTS: ",".join(faults), "PYTHONPATH": path}


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> object:
    def put(*faults: str) -> None:
        for name, value in simulated(*faults).items():
            monkeypatch.setenv(name, value)

    return put


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.verdict for finding in found}


def faults(found: list[Finding]) -> dict[str, str]:
    return {finding.subject: finding.fault for finding in found if finding.fault}


@pytest.mark.gate
def test_ops_that_are_wrong_or_die_are_found_and_the_others_are_tried(simulate, tmp_path: Path) -> None:
    simulate("die:rms_norm", "wrong:rotary_pos_embedding")
    found = one_by_one(tmp_path, WORDS, ["product", "rms_norm fp32", "rope fp32", "layer_norm fp32"], PATIENCE)
    assert verdicts(found) == {
        "product": "ok",
        "rms_norm fp32": "wrong",
        "rope fp32": "wrong",
        "layer_norm fp32": "ok",
    }
    assert faults(found)["rms_norm fp32"].startswith("died of SIGABRT")
    assert "cosine to the reference" in faults(found)["rope fp32"]


def test_an_op_that_hangs_is_ended_and_the_others_are_tried(simulate, tmp_path: Path) -> None:
    simulate("hang:sdpa_recomp_fwd")
    found = one_by_one(tmp_path, WORDS, ["attention fp32", "rope fp32"], 40.0)
    assert verdicts(found) == {"attention fp32": "wrong", "rope fp32": "ok"}
    assert "hung: nothing in 40 s" in faults(found)["attention fp32"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("version", "Compile-time major/minor PyTorch version"),
        ("no-local-version", "has no attribute 'startswith'"),
        ("library", "libhabana_pytorch2_plugin.so"),
    ],
)
def test_a_bridge_that_cannot_be_imported_ends_the_trials(simulate, tmp_path: Path, fault: str, words: str) -> None:
    """The bridge is imported by torch, as in training; the doctor itself reports the class and the text."""
    simulate(fault)
    found = one_by_one(tmp_path, WORDS, ["product", "rope fp32"], PATIENCE)
    assert verdicts(found) == {"import": "wrong", "other trials": "note"}
    assert "Failed to load the backend extension" in faults(found)["import"]
    bridge = bridge_by_doctor(simulated(fault))
    assert bridge["verdict"] == "wrong"
    assert words in bridge["fault"]


def bridge_by_doctor(environment: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron.tools.cli.main", "doctor", "--json"],
        env=own_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rows = {row["subject"]: row for row in json.loads(done.stdout)}
    found: dict[str, str] = rows["Gaudi bridge"]
    return found


def test_lazy_mode_needs_gaudis_own_torch() -> None:
    bridge = bridge_by_doctor({**simulated("stock"), "PT_HPU_LAZY_MODE": "1"})
    assert bridge["verdict"] == "wrong"
    assert "Stock PyTorch version" in bridge["fault"]


def test_a_group_that_hangs_and_a_rank_that_dies(simulate, tmp_path: Path) -> None:
    simulate("hang:hccl")
    (found,) = together(tmp_path, WORDS, 40.0)
    assert (found.subject, found.verdict) == ("collectives", "wrong")
    assert "hung: nothing in 40 s" in found.fault
    assert "rank 1 in groups of 2 devices died of SIGKILL" in found.fault
    (tmp_path / "second").mkdir()
    simulate("die:hccl")
    found = together(tmp_path / "second", WORDS, PATIENCE)[-1]
    assert "died of SIGABRT" in found.fault


def command(folder: Path, *words: str, **environment: str) -> tuple[int, dict[str, dict[str, str]], str]:
    """Exit status and report of the command."""
    report = folder / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lightning_megatron.tools.cli.main",
            "doctor",
            "--device",
            "--report",
            str(report),
            *words,
        ],
        env=own_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stderr
    text = report.with_suffix(".txt").read_text()
    assert done.stdout.startswith(text)
    return done.returncode, {row["subject"]: row for row in json.loads(report.read_text())}, text


def test_a_simulated_gaudi_passes_and_the_report_says_what_was_tried(tmp_path: Path) -> None:
    status, rows, text = command(tmp_path, "--tokens", "16", **simulated())
    assert status == 0, text
    assert "hpu: a product," in rows["device trials"]["value"]
    expected = {"product", "groups of 2 devices", "all_to_all bfloat16", *op_trials("hpu")}
    assert expected <= {name for name, row in rows.items() if row["verdict"] == "ok"}
    kernels = {"attention bf16": "FusedSDPA", "rope fp32": "RotaryPos", "adamw fp32": "FusedAdamW"}
    for name, kernel in {**kernels, "linear_fp8 bf16": "hpu::fp8_gemm_v2"}.items():
        assert rows[name]["value"].startswith(kernel)


def test_a_machine_without_accelerator_says_that_it_tries_the_cpu(tmp_path: Path) -> None:
    status, rows, text = command(tmp_path, "--tokens", "16")
    assert status == 0, text
    assert rows["device trials"]["value"].startswith("cpu: a product,")
    assert rows["device trials"]["value"].endswith("collectives of 2 processes")
    assert rows["send and receive bfloat16"]["verdict"] == "ok"


def test_differences_are_found() -> None:
    import torch

    from lightning_megatron.tools.cli.doctor.op_trials import _differences

    def faults_of(ours: Tensor) -> list[str]:
        return list(_differences("output", ours, right, 0.99))

    right = torch.arange(1.0, 9.0)
    assert faults_of(right * 1.01) == []
    assert faults_of(right * 2) == ["output: 2.000 times as long as the reference's"]
    assert "cosine" in faults_of(right.flip(0))[0]
    assert faults_of(right / 0) == ["output has NaN or infinity"]

"""The command of a PyTorchJob's pods, run here with the variables that the operator gives them; no Kubernetes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import STEPS, losses, recipe, runs, steps_done, uninterrupted, variables

from lightning_megatron.cli.launch.recipe import read_job
from lightning_megatron.launching.kubernetes import manifest
from lightning_megatron.testing.ports import free_port


def start(folder: Path) -> list[subprocess.Popen[str]]:
    """Two pods of one device each."""
    given = {"nodes": 2, "devices_per_node": 1, "image": "x", "python": sys.executable}
    job = manifest(read_job([str(folder / "recipe.yaml")], [], given))
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {f"PET_{name}": value for name, value in place.items()}
    place |= {"WORLD_SIZE": "2", "PET_NNODES": "2"}
    place["PET_NPROC_PER_NODE"] = job["spec"]["nprocPerNode"]
    pods = []
    for rank, replica in enumerate(job["spec"]["pytorchReplicaSpecs"].values()):
        (container,) = replica["template"]["spec"]["containers"]
        own = variables(folder, **place, RANK=str(rank), PET_NODE_RANK=str(rank))
        with (folder / f"pod-{rank}.out").open("a") as said:
            pods.append(
                subprocess.Popen(container["command"], cwd=folder, env=own, stdout=said, stderr=said, text=True)
            )
    return pods


def said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("pod-*.out")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("evicted", [[1], [0, 1]], ids=["one pod", "both"])
def test_evicted_pods_that_are_started_again_go_on_with_the_same_losses(tmp_path: Path, evicted: list[int]) -> None:
    whole = uninterrupted(tmp_path / "whole")
    folder = tmp_path / "run"
    recipe(folder)
    pods = start(folder)
    end = time.monotonic() + 300
    try:
        while steps_done(folder) < 5:
            assert all(pod.poll() is None for pod in pods), said(folder)
            assert time.monotonic() < end, said(folder)
            time.sleep(0.1)
        for number in evicted:
            pods[number].send_signal(signal.SIGTERM)
        assert all(pod.wait(120) != 0 for pod in pods), said(folder)
    finally:
        for pod in pods:
            pod.kill()
    assert 5 <= steps_done(folder) < STEPS
    again = start(folder)
    assert [pod.wait(600) for pod in again] == [0, 0], said(folder)
    assert runs(folder) == 2
    assert losses(folder) == whole

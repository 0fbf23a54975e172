"""The batch scripts on a real Slurm of two nodes on the loopback address; skipped where there is none."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_slurm import Slurm, cluster, programs
from training import STEPS, losses, recipe, runs, steps_done, uninterrupted, variables

from lightning_megatron.tools.cli.launch.recipe import read_job
from lightning_megatron.tools.launching.slurm import batch_script
from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

FOUND = programs()
ROOT = str(Path(__file__).parents[2])
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(FOUND is None, reason="slurmctld, slurmd and their commands are not here"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    assert FOUND is not None
    with cluster(FOUND, tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return uninterrupted(tmp_path_factory.mktemp("whole"))


def script(folder: Path, tasks: str, **section: object) -> Path:
    """A batch script for two nodes with a device each."""
    path = recipe(folder)
    slurm_section = {"tasks": tasks, "time": "10", "exclusive": False, "cpus_per_task": 1, **section}
    given = {"nodes": 2, "devices_per_node": 1, "grace": 60, "python": sys.executable, "slurm": slurm_section}
    (folder / "job.sbatch").write_text(batch_script(read_job([str(path)], [], given), "job.sbatch"))
    return folder / "job.sbatch"


def submit(slurm: Slurm, folder: Path, *words: str) -> str:
    # The names of the two nodes do not resolve.
    known = {**variables(folder), "MASTER_ADDR": "127.0.0.1", "RECIPE": "recipe.yaml"}
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "PYTHONPATH", "MASTER_ADDR", "RECIPE")
    given = {name: known[name] for name in names}
    return slurm.submit(f"--chdir={folder}", *words, str(folder / "job.sbatch"), **given)


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*.out")))


def await_steps(slurm: Slurm, job: str, folder: Path, steps: int) -> None:
    end = time.monotonic() + 300
    while steps_done(folder) < steps:
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), output(folder)
        assert time.monotonic() < end, output(folder)
        time.sleep(0.1)


@pytest.mark.parametrize("tasks", ["device", "node"])
def test_a_preempted_job_is_queued_again_and_goes_on_with_the_same_losses(
    slurm: Slurm, whole: dict[int, float], tmp_path: Path, tasks: str
) -> None:
    """SIGUSR1 as before a time limit; the same losses as a run that nobody ends, bit for bit."""
    script(tmp_path, tasks)
    job = submit(slurm, tmp_path)
    await_steps(slurm, job, tmp_path, 5)
    slurm.run("scancel", "--signal=USR1", job)
    fields = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert fields["JobState"] == "COMPLETED", output(tmp_path)
    assert fields["Restarts"] == "1", output(tmp_path)
    assert runs(tmp_path) == 2, output(tmp_path)
    assert losses(tmp_path) == whole
    assert "saving step" in output(tmp_path)


@pytest.mark.parametrize("tasks", ["device", "node"])
def test_a_job_that_is_preempted_before_its_first_step_begins_again(
    slurm: Slurm, whole: dict[int, float], tmp_path: Path, tasks: str
) -> None:
    script(tmp_path, tasks)
    job = submit(slurm, tmp_path)
    slurm.wait(job, "RUNNING")
    time.sleep(4)  # Python is importing
    assert steps_done(tmp_path) == 0
    slurm.run("scancel", "--signal=USR1", job)
    fields = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), output(tmp_path)
    assert losses(tmp_path) == whole


def test_a_cancelled_job_saves_and_does_not_come_back(slurm: Slurm, whole: dict[int, float], tmp_path: Path) -> None:
    script(tmp_path, "device")
    job = submit(slurm, tmp_path)
    await_steps(slurm, job, tmp_path, 3)
    slurm.run("scancel", "--signal=TERM", job)
    fields = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (fields["JobState"], fields["Restarts"], fields["ExitCode"]) == ("FAILED", "0", "143:0"), output(tmp_path)
    found = losses(tmp_path)
    assert 3 <= len(found) < STEPS
    assert found == {step: whole[step] for step in found}
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("recipe", recipe_names())
def test_slurm_accepts_the_script_of_every_recipe(slurm: Slurm, tmp_path: Path, recipe: str) -> None:
    """On nodes that are there by name; more devices than they have are refused."""
    path, files = tmp_path / "job.sbatch", recipe_files(recipe)
    trainer = contents_of(files)["trainer"]
    sizes = {"nodes": trainer.get("num_nodes", 1), "devices_per_node": trainer["devices"], "device": "nvidia"}
    for tasks in ("device", "node"):
        given = {**sizes, "slurm": {"tasks": tasks, "partition": "far"}}
        path.write_text(batch_script(read_job([str(file) for file in files], [], given)))
        slurm.run("sbatch", "--test-only", str(path))
        done = slurm.run("sbatch", "--test-only", "--gres=gpu:9", str(path), check=False)
        assert "node configuration is not available" in done.stderr


def test_launch_knows_the_partitions_of_the_site(slurm: Slurm, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lightning_megatron.tools.cli.main", "launch", "--recipe", "llama-tiny"]
    for partition, status in (("main", 0), ("gaudi", 2)):
        (tmp_path / "cluster.yaml").write_text(f"cluster: {{nodes: 4, slurm: {{partition: {partition}}}}}")
        section = ["--config", str(tmp_path / "cluster.yaml"), "--launcher", "slurm", "--dry-run"]
        done = slurm.run(*words, *section, check=False, PYTHONPATH=ROOT)
        assert done.returncode == status, done.stderr
    assert "cluster.slurm.partition='gaudi'" in done.stderr
    assert "nearest valid: main" in done.stderr


def test_slurm_accepts_the_scripts_and_refuses_what_it_does_not_have(slurm: Slurm, tmp_path: Path) -> None:
    for tasks in ("device", "node"):
        path = script(tmp_path, tasks)
        assert slurm.run("sbatch", "--test-only", str(path)).returncode == 0
    for words, said in (
        (["--nodes=3"], "node configuration is not available"),
        (["--partition=gaudi"], "invalid partition"),
        (["--ntasks-per-node=9"], "node configuration is not available"),
    ):
        done = slurm.run("sbatch", "--test-only", *words, str(path), check=False)
        assert done.returncode != 0, words
        assert said in done.stderr.lower(), shlex.join(words)

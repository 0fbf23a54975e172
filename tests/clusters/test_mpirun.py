"""Open MPI's real ``mpirun`` without mpi4py, and torchrun; skipped where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training import STEPS, losses, recipe, runs, steps_done, uninterrupted, variables, which

MPIRUN = which("mpirun") or which("orterun")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not here")
FIT = ["-m", "lightning_megatron.tools.cli.main", "fit", "--config", "recipe.yaml", "--ckpt_path", "last"]


def mpi_variables(folder: Path) -> dict[str, str]:
    """Environment in which an Open MPI that is only unpacked finds itself."""
    prefix = os.environ.get("MPI_PREFIX")
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more["OMPI_MCA_plm"] = "isolated"  # no ssh is needed
    if prefix is not None:
        libraries = sorted({str(path.parent) for path in Path(prefix).rglob("lib*.so*")})
        more |= {"OPAL_PREFIX": f"{prefix}/usr", "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
        more["PATH"] = f"{prefix}/usr/bin{os.pathsep}{os.environ['PATH']}"
    return variables(folder, **more)


def start(folder: Path, launcher: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *FIT]
    known = variables(folder)
    if launcher == "mpirun":
        assert MPIRUN is not None
        mpi = ["-n", "2", "--oversubscribe", "--map-by", "slot", "--bind-to", "none"]
        words, known = [MPIRUN, *mpi, sys.executable, *FIT], mpi_variables(folder)
    elif launcher == "launch":
        assert MPIRUN is not None
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "mpirun").unlink(missing_ok=True)
        (folder / "bin" / "mpirun").symlink_to(MPIRUN)
        (folder / "cluster.yaml").write_text(f"cluster: {{python: {sys.executable}}}")
        words = [sys.executable, "-m", "lightning_megatron.tools.cli.main", "launch", "--config", "recipe.yaml"]
        words += ["--config", "cluster.yaml", "--launcher", "mpirun"]
        known = mpi_variables(folder)
        known["PATH"] = f"{folder}/bin{os.pathsep}{known['PATH']}"
    said = (folder / f"{launcher}.out").open("a")
    with said:
        return subprocess.Popen(words, cwd=folder, env=known, stdout=said, stderr=subprocess.STDOUT, text=True)


def preempted(folder: Path, launcher: str, number: int) -> None:
    """A run that gets a signal by its launcher, and is started again by the same command."""
    recipe(folder)
    job = start(folder, launcher)
    end = time.monotonic() + 300
    while steps_done(folder) < 5:
        assert job.poll() is None, (folder / f"{launcher}.out").read_text()
        assert time.monotonic() < end, (folder / f"{launcher}.out").read_text()
        time.sleep(0.1)
    job.send_signal(number)
    try:
        assert job.wait(60) != 0
    finally:
        job.kill()
    assert steps_done(folder) < STEPS
    again = start(folder, launcher)
    assert again.wait(600) == 0, (folder / f"{launcher}.out").read_text()


@needs_mpirun
@pytest.mark.slow
def test_mpirun_starts_one_job_of_two_ranks(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path / "whole")
    recipe(tmp_path / "mpi", seconds=0.0)
    job = start(tmp_path / "mpi", "mpirun")
    assert job.wait(600) == 0, (tmp_path / "mpi" / "mpirun.out").read_text()
    assert runs(tmp_path / "mpi") == 1
    assert losses(tmp_path / "mpi") == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("torchrun", signal.SIGTERM),
        pytest.param("mpirun", signal.SIGUSR1, marks=needs_mpirun),
        pytest.param("launch", signal.SIGTERM, marks=needs_mpirun),
    ],
)
def test_a_run_that_is_ended_through_its_launcher_goes_on_with_the_same_losses(
    tmp_path: Path, launcher: str, number: int
) -> None:
    whole = uninterrupted(tmp_path / "whole")
    preempted(tmp_path / "run", launcher, number)
    assert runs(tmp_path / "run") == 2
    assert losses(tmp_path / "run") == whole

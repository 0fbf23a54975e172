"""What `launch` prints, and checks of it, for tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from custom_resources import faults

from lightning_megatron.tools.cli.main import main

ROOT = Path(__file__).parents[3]
KINDS = ("PyTorchJob", "MPIJob")


def launched(*words: str, status: int = 0) -> str:
    """Text that a dry run prints, or its error."""
    said, wrong = StringIO(), StringIO()
    with redirect_stdout(said), redirect_stderr(wrong):
        assert main(["launch", *words]) == status, wrong.getvalue()
    return said.getvalue() if status == 0 else wrong.getvalue()


def is_manifest(manifest: Mapping[str, Any]) -> None:
    """A manifest by Kubernetes' schemas; one of an operator by its fields, and its pods by the schemas."""
    templates = []
    if manifest["kind"] in KINDS:
        assert list(faults(dict(manifest))) == []
        replicas = next(value for name, value in manifest["spec"].items() if name.endswith("ReplicaSpecs"))
        templates = [replica["template"] for replica in replicas.values()]
    validate = pytest.importorskip("kubernetes_validate")
    for pod in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        validate.validate(pod, validate.latest_version(), strict=True)
    if not templates:
        validate.validate(dict(manifest), validate.latest_version(), strict=True)


def section(folder: Path, **changes: Any) -> str:
    given = {"image": "registry.example/x:1", "devices_per_node": 8, "nodes": 4, **changes}
    (folder / "cluster.yaml").write_text(yaml.safe_dump({"cluster": given}))
    return str(folder / "cluster.yaml")


def run_script(path: Path, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script with stand-ins for launchers' commands, which write down their words; no job is started."""
    writes = 'printf "%s\\n" "$@" > "$HOME/{0}"; env > "$HOME/{0}.env"; exit "${{STATUS:-0}}"'
    for name, text in {
        **{program: writes.format(program) for program in ("srun", "mpirun", "python3")},
        "scontrol": 'echo "$@" >> "$HOME/scontrol"; seq --format=node%g 100000',
    }.items():
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    known = {"PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), **slurm, **variables}
    return subprocess.run(["bash", str(path), *words], env=known, capture_output=True, text=True, check=False)

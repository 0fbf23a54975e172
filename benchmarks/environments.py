"""Contestants of the comparison, and an environment for each set of packages that they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from peers.protocol import Job

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Peer:
    """A contestant's module, its abilities, and its environment.

    Attributes:
        module: module of the package ``peers``.
        environment: key of ``ENVIRONMENTS``; empty to run in this environment.
        axes: parallel axes that it supports.
        combines: True if it can combine several of them.
        single: True if it is set up for one process.
        models: prefixes of the names of models that it supports.
    """

    module: str
    environment: str
    axes: tuple[str, ...] = ()
    combines: bool = False
    single: bool = True
    models: tuple[str, ...] = ("llama", "gpt", "mixtral")

    def unable(self, model: str, job: Job) -> str | None:
        """The reason why it cannot train this row; ``None`` if it can."""
        if not model.startswith(self.models):
            return f"has no such model in this comparison (has {', '.join(self.models)})"
        missing = [axis for axis in job.axes if axis not in self.axes]
        if missing:
            return f"has no {', '.join(missing)} here (has {', '.join(self.axes) or 'one process'})"
        if not job.axes and not self.single:
            return "is set up for several processes"
        if len(job.axes) > 1 and not self.combines:
            return "is set up for one axis at a time"
        if job.accelerator != "cpu" and self.whole_on_each(model):
            return "keeps the whole model and its optimizer on every card, which has 80 GB"
        return None

    def whole_on_each(self, model: str) -> bool:
        """True if the peer keeps the whole model on each card, and this model is too large for that."""
        return self.module == "hugging_face" and model in ("llama3.1-8b", "mixtral-8x1b")


ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "lightning": ("lightning>=2.5,<3", "transformers>=4.45", "safetensors"),
    "litgpt": ("litgpt>=0.5,<0.6", "safetensors", "numpy"),
    "torchtitan": ("torchtitan>=0.3,<0.4", "triton", "safetensors", "numpy"),  # it is imported on a CPU too
}
"""Packages besides torch."""

PEERS = {
    "ours": Peer("ours", "", ("dp", "tp", "pp", "cp", "ep"), True),
    "tuned loop": Peer("tuned_loop", "lightning"),
    "hugging face": Peer("hugging_face", "lightning", ("dp", "ep")),
    "model parallel": Peer("model_parallel", "lightning", ("dp", "tp"), single=False, models=("llama",)),
    "litgpt": Peer("litgpt_loop", "litgpt", models=("llama", "mixtral")),
    "torchtitan": Peer("torchtitan_loop", "torchtitan", ("dp", "tp", "pp"), True, False, ("llama",)),
}


def python_of(name: str, folder: Path) -> Path:
    """Python of an environment, with this one's version of torch; installed at the first call.

    Args:
        name: key of ``ENVIRONMENTS``; empty for this environment.
        folder: folder of the environments.
    """
    if not name:
        return Path(sys.executable)
    place, requirements = folder / name, ENVIRONMENTS[name]
    python, ready = place / "bin" / "python", place / "ready.json"
    version = torch.__version__.partition("+")[0]
    wanted = [*requirements, f"torch=={version}"]
    if ready.exists() and json.loads(ready.read_text())["requirements"] == wanted:
        return python
    print(f"installing {name} into {place}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    # torch by itself, since a local build may be preferred to one that brings CUDA; then the rest around it.
    subprocess.run([*pip, "install", "-qq", f"torch=={version}"], check=True)
    subprocess.run([*pip, "install", "-qq", *wanted], check=True)
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, stdout=subprocess.PIPE, text=True)
    versions = {found["name"]: found["version"] for found in json.loads(listed.stdout)}
    ready.write_text(json.dumps({"requirements": wanted, "versions": versions}))
    return python


def versions_of(name: str, folder: Path) -> dict[str, str]:
    """Versions of the packages that an environment was made for."""
    ready = folder / name / "ready.json"
    if not name or not ready.exists():
        return {}
    found = json.loads(ready.read_text())["versions"]
    named = [r.partition(">")[0].partition("=")[0] for r in (*ENVIRONMENTS[name], "torch")]
    return {package: found[package] for package in named if package in found}


def weights_of(model: str, folder: Path) -> Path:
    """Hugging Face directory of a model's random weights; made at the first call."""
    place = folder / model
    if not (place / "config.json").exists():
        part = place.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        path = os.pathsep.join((str(HERE), str(ROOT)))
        command = [sys.executable, "-m", "peers.weights", model, str(part)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        part.rename(place)
    return place.resolve()

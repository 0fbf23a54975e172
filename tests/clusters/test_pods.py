"""The commands of pods, run here with the variables that the operator gives them; no Kubernetes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from training import STEPS, losses, recipe, runs, steps_done, uninterrupted, variables

from lightning_megatron.testing.ports import free_port
from lightning_megatron.tools.cli.launch.recipe import read_job
from lightning_megatron.tools.launching.kubernetes import manifests

ROOT = Path(__file__).parents[2]


def mounted(manifest: dict[str, Any], config_map: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The container of a job's first pod, with its ConfigMap in a folder here."""
    spec = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (container,) = spec["containers"]
    (name,) = [
        each["name"] for each in spec["volumes"] if each.get("configMap") == {"name": config_map["metadata"]["name"]}
    ]
    (place,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == name]
    folder.mkdir(exist_ok=True)
    for key, text in config_map["data"].items():
        (folder / key).write_text(text)
    return {**container, "command": [word.replace(place, str(folder)) for word in container["command"]]}


def start(folder: Path) -> list[subprocess.Popen[str]]:
    """Two pods of one device each."""
    given = {"nodes": 2, "devices_per_node": 1, "image": "x", "python": sys.executable}
    config_map, job = manifests(read_job([str(folder / "recipe.yaml")], [], given))
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {f"PET_{name}": value for name, value in place.items()}
    place |= {"WORLD_SIZE": "2", "PET_NNODES": "2"}
    place["PET_NPROC_PER_NODE"] = job["spec"]["nprocPerNode"]
    pods = []
    for rank in range(len(job["spec"]["pytorchReplicaSpecs"])):  # whose pods are alike
        container = mounted(job, config_map, folder / "mounted")
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


RECIPE = """
cluster: {devices_per_node: 1, image: x, environment: {NUM_LAYERS: "2"}}
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  strategy: {class_path: lightning_megatron.MegatronStrategy, init_args: {tp: 2}}
  max_steps: 3
  limit_val_batches: 0
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: run, name: log}}
model:
  class_path: LlamaModule
  init_args: {config: llama-tiny, lr: 0.01}
  dict_kwargs: {num_layers: 6, hidden_size: 64, ffn_hidden_size: 24, head_dim: 8, vocab_size: 1000}
data:
  class_path: MegatronDataModule
  init_args: {data_path: data/corpus_text_document, seq_length: 128, batch_size: 4}
"""
SIZES = {"TP": "1", "MICRO_BATCH_SIZE": "2", "HIDDEN_SIZE": "32", "NUM_ATTENTION_HEADS": "4", "NUM_QUERY_GROUPS": "2"}
SIZES |= {"SEQ_LENGTH": "16", "GLOBAL_BATCH_SIZE": "6"}


@pytest.mark.slow
def test_a_pod_needs_an_empty_folder_and_its_manifest(tmp_path: Path) -> None:
    """Losses of a run with these sizes in its recipe; data are made by the Job of examples/kubernetes as it stands."""
    written, volume = tmp_path / "recipe.yaml", tmp_path / "volume"
    written.write_text(RECIPE)
    config_map, job = manifests(read_job([str(written)], [], {}, variables=SIZES))
    written.unlink()
    volume.mkdir()
    data = yaml.safe_load((ROOT / "examples/kubernetes/get-data.yaml").read_text())
    (fetching,) = data["spec"]["template"]["spec"]["containers"]
    for container in (fetching, mounted(job, config_map, tmp_path / "mounted")):
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "1",
        }
        place["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = variables(volume, **place, **{each["name"]: each["value"] for each in container["env"]})
        words = [*container["command"], *container.get("args", [])]
        done = subprocess.run(words, cwd=volume, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    found = losses(volume)
    assert len(found) == 3
    shutil.rmtree(volume / "run")
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    recipe = yaml.safe_load(RECIPE)
    recipe["model"]["dict_kwargs"] |= sizes
    recipe["data"]["init_args"] |= {"seq_length": 16, "batch_size": 6}
    recipe["trainer"]["strategy"]["init_args"] = {"micro_batch_size": 2}
    (volume / "by-hand.yaml").write_text(yaml.safe_dump(recipe))
    words = [sys.executable, "-m", "lightning_megatron.tools.cli.main", "fit", "--config", "by-hand.yaml"]
    subprocess.run(words, cwd=volume, env=variables(volume), capture_output=True, check=True)
    assert losses(volume) == found

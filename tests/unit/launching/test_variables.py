"""Every variable that the documents list is read by what `launch` prints, or refused by its name."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from printed import KINDS, ROOT, launched, run_script, section

from lightning_megatron import MegatronDataModule, MegatronStrategy
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.tools.launching.job import LAYOUT_SIZES, MODEL_SIZES, OPTIONS

TABLE = (ROOT / "docs" / "clusters.md").read_text().partition("## Sizes from the environment")[2].partition("```")[0]
ROWS = [line.split(" | ", 1) for line in TABLE.splitlines() if line.startswith("| `")]
OF_ALL, OF_SCRIPTS, OF_FINETUNING = (
    [name for cell, text in ROWS if keep(text) for name in re.findall("`([A-Z_]+)`", cell)]
    for keep in (
        lambda text: not text.startswith("only in"),
        lambda text: text.startswith("only in batch"),
        lambda text: text.startswith("only in `finetune"),
    )
)
SCRIPTS = {name: OF_ALL + OF_SCRIPTS for name in ("pretrain.sbatch", "pretrain-torchrun.sbatch")}
SCRIPTS["finetune.sbatch"] = OF_ALL + OF_SCRIPTS + OF_FINETUNING
LLAMA = ("--recipe", "llama3.1-8b", "--dry-run")


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in OPTIONS:
        monkeypatch.delenv(name, raising=False)


def test_the_documents_list_what_is_read() -> None:
    assert sorted(OF_ALL) == sorted(OPTIONS)
    for script, known in SCRIPTS.items():
        head, _, body = (ROOT / "examples" / "slurm" / script).read_text().partition("\nset -euo")
        refused = MODEL_SIZES if script == "finetune.sbatch" else ()
        listed = set(re.findall(r"\b[A-Z][A-Z_]+\b", head.partition("In the environment:")[2])) - {"YAML"}
        assert listed == set(known) - set(refused), script
        assert all(re.search(rf"\b{name}\b", body) for name in known), script


def test_what_they_replace_is_there() -> None:
    data = inspect.signature(MegatronDataModule).parameters
    assert set(LAYOUT_SIZES) <= {name.upper() for name in inspect.signature(MegatronStrategy).parameters}
    assert set(MODEL_SIZES) <= {field.name.upper() for field in fields(TransformerConfig)}
    assert {name.lower() for name in OPTIONS.keys() - LAYOUT_SIZES.keys() - MODEL_SIZES.keys()} <= set(data)


def words_of(folder: Path, program: str) -> str:
    """Words that a launcher's command has got, where ranks meet, and the interpreter."""
    variables = (folder / f"{program}.env").read_text()
    return (folder / program).read_text() + "".join(re.findall(r"^(?:MASTER_|PYTHON=).*\n", variables, re.MULTILINE))


SEVERAL = {name: str(number) for number, name in enumerate(OF_ALL, 7)}
"""All of them at once, each with a value of its own."""


def has_read(names: list[str], text: str) -> bool:
    return all("\n".join([*OPTIONS[name], SEVERAL[name]]) in text for name in names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_batch_script_reads_or_refuses_each(tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("PYTHON=of-venv")
    (tmp_path / "step=3.ckpt").mkdir()
    path, usual = ROOT / "examples" / "slurm" / script, {"HF_DIR": "weights", "IMAGE": "image"}

    def said(given: dict[str, str]) -> str:
        done = run_script(path, tmp_path, **usual, **given)
        assert done.returncode == 0, done.stderr
        return words_of(tmp_path, "srun")

    refused = MODEL_SIZES if script == "finetune.sbatch" else ()
    read = [name for name in OF_ALL if name not in refused]
    assert has_read(read, said({name: SEVERAL[name] for name in read}))
    for name in refused:
        done = run_script(path, tmp_path, **usual, **{name: "7"})
        assert (done.returncode, f"{name}=7: the weights" in done.stderr) == (2, True)
    before = said({})
    for name in set(SCRIPTS[script]) - set(OF_ALL) - set(usual):
        assert said({name: str(tmp_path) if name in ("VENV", "CHECKPOINTS") else "7"}) != before, name
    assert all(value in before for name, value in usual.items() if name in SCRIPTS[script])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_reads_each(tmp_path: Path, kind: str) -> None:
    cluster = section(tmp_path, kubernetes={"kind": kind})
    job = yaml.safe_load(launched("--config", cluster, *LLAMA, "--launcher", "kubernetes"))
    replicas = next(value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    (container,) = next(iter(replicas.values()))["template"]["spec"]["containers"]
    (tmp_path / "pod.sh").write_text(f"set -euo pipefail\n{container['command'][-1]}")
    (tmp_path / "hosts").write_text("worker-0 slots=8\n")
    done = run_script(tmp_path / "pod.sh", tmp_path, **SEVERAL, OMPI_MCA_orte_default_hostfile=f"{tmp_path}/hosts")
    assert done.returncode == 0, done.stderr
    assert has_read(OF_ALL, words_of(tmp_path, "mpirun" if kind == "MPIJob" else "python3"))


def test_launch_hands_its_own_to_every_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `cluster.environment` come first; a batch script asks the environment in which it is submitted."""
    monkeypatch.setenv("NUM_LAYERS", "4")
    monkeypatch.setenv("TP", "2")
    cluster = section(tmp_path, environment={"TP": "8"}, nodes=1)
    words = ("--config", cluster, *LLAMA, "--launcher")
    job = yaml.safe_load(launched(*words, "kubernetes"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "NUM_LAYERS", "value": "4"}, {"name": "TP", "value": "8"}]
    for launcher in ("torchrun", "mpirun"):
        given = shlex.split(launched(*words, launcher).replace("\\\n", " "))
        assert given[-4:] == ["--model.dict_kwargs.num_layers", "4", "--trainer.strategy.tp", "8"]
    (tmp_path / "job.sbatch").write_text(launched(*words, "slurm"))
    for more, tp in (({}, "8"), ({"TP": "1"}, "1")):
        done = run_script(tmp_path / "job.sbatch", tmp_path, **more)
        assert done.returncode == 0, done.stderr
        text = words_of(tmp_path, "srun")
        assert f"--model.dict_kwargs.num_layers\n4\n--trainer.strategy.tp\n{tp}\n" in text


@pytest.mark.parametrize(
    ("variables", "words", "said"),
    [
        ({"NUM_LAYERS": "four", "SEQ_LENGTH": "0"}, (), ("NUM_LAYERS='four'", "SEQ_LENGTH='0'")),
        ({"TP": "3"}, (), ("tp=3",)),
        ({"NUM_LAYERS": "64", "HIDDEN_SIZE": "8192", "NUM_ATTENTION_HEADS": "48"}, (), ("num_attention_heads=48",)),
        ({"TP": "2"}, ("--trainer.strategy.tp=4",), ("TP='2'", "--trainer.strategy.tp=4")),
    ],
)
def test_sizes_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = launched(*LLAMA, "--launcher", "slurm", "--", *words, status=2)
    assert all(text in error for text in said), error


@pytest.mark.parametrize("given", [{"CORPUS": "https://data.example/x.jsonl"}, {"TOKENIZER": "https://data.example/x"}])
def test_the_job_that_gets_data_needs_both_addresses(tmp_path: Path, given: dict[str, str]) -> None:
    """tests/clusters/test_pods.py runs it without any."""
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "get-data.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "pod.sh").write_text(f"set -euo pipefail\ncd '{tmp_path}'\n{container['args'][0]}")
    done = run_script(tmp_path / "pod.sh", tmp_path, **given)
    assert done.returncode != 0
    assert "the address of" in done.stderr
    done = run_script(tmp_path / "pod.sh", tmp_path, CORPUS="https://x.example/y.json.xz", TOKENIZER="z")
    assert done.returncode == 0, done.stderr
    assert "https://x.example/y.json.xz\ndata/corpus.jsonl.xz\nz\ndata/tokenizer.model\n" in words_of(
        tmp_path, "python3"
    )

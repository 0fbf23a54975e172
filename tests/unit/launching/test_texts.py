"""Scripts, manifests and commands: what `launch` prints is what the examples are, and what their readers accept."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from custom_resources import faults
from printed import KINDS, ROOT, is_manifest, launched, run_script, section

from lightning_megatron.tools.recipes.contents import contents_of
from lightning_megatron.tools.recipes.names import recipe_files, recipe_names

EXAMPLES = ROOT / "examples"
MADE_BY = re.compile(r"^# Made by: lightning-megatron (.*)$", re.MULTILINE)
MADE = [path for path in sorted(EXAMPLES.glob("*/*")) if path.is_file() and MADE_BY.search(path.read_text())]
SCRIPTS = [*sorted(EXAMPLES.glob("slurm/*.sbatch")), ROOT / "docker" / "run.sh"]
MANIFESTS = sorted(EXAMPLES.glob("kubernetes/*.yaml"))
RECIPES = recipe_names()
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", MADE, ids=names(MADE))
def test_an_example_is_what_launch_prints(path: Path) -> None:
    """After a change: run the command in the head of the file again."""
    (words,) = MADE_BY.findall(path.read_text())
    assert main_text(words) == path.read_text()


def main_text(words: str) -> str:
    return launched(*shlex.split(words)[1:])


def test_there_is_an_example_of_each_kind() -> None:
    assert {path.name for path in MADE} == {
        "pretrain.sbatch",
        "pretrain-torchrun.sbatch",
        "finetune.sbatch",
        "pytorchjob.yaml",
        "mpijob.yaml",
    }


# Scripts


def checker(name: str) -> str | None:
    """Path of a program that pip installs beside Python, or that is in PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def is_clean(text: str) -> None:
    """A script for bash, without a finding of shellcheck where that is installed."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    if shellcheck := checker("shellcheck"):
        done = subprocess.run(
            [shellcheck, "--shell=bash", "-"], input=text, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=names(SCRIPTS))
def test_a_script_is_clean(path: Path) -> None:
    is_clean(path.read_text())


def test_sizes_and_places_of_the_environment_reach_the_run(tmp_path: Path) -> None:
    variables = {"RECIPE": "a.yaml b.yaml", "DATA_PATH": "/data/x", "TP": "4", "MICRO_BATCH_SIZE": "2", "DEVICES": "4"}
    variables |= {"IMAGE": "image.sqsh", "PYTHON": "python3.11"}
    script = EXAMPLES / "slurm" / "pretrain.sbatch"
    done = run_script(script, tmp_path, "--trainer.max_steps", "5", **variables)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "srun").read_text().split("\n")[:-1]
    assert words == [
        "--label",
        "--wait=300",
        "--container-image=image.sqsh",
        f"--container-mounts={ROOT}:{ROOT}",
        f"--container-workdir={ROOT}",
        *("python3.11", "-m", "lightning_megatron.tools.cli.main", "fit", "--config", "a.yaml", "--config", "b.yaml"),
        *("--ckpt_path", "last", "--trainer.num_nodes", "2", "--trainer.devices", "4", "--data.data_path", "/data/x"),
        *("--trainer.strategy.tp", "4", "--trainer.strategy.micro_batch_size", "2", "--trainer.max_steps", "5"),
    ]


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (138, True), (143, False), (1, False)])
def test_only_a_preempted_run_is_queued_again(tmp_path: Path, status: int, requeued: bool) -> None:
    done = run_script(EXAMPLES / "slurm" / "pretrain.sbatch", tmp_path, STATUS=str(status))
    assert done.returncode == status
    assert "show hostnames node[1-2]" in (tmp_path / "scontrol").read_text()
    assert ("requeue 77" in (tmp_path / "scontrol").read_text()) == requeued


@pytest.mark.parametrize(
    ("script", "variables", "said"),
    [
        ("pretrain.sbatch", {"SLURM_JOB_ID": ""}, "submit this script with sbatch"),
        ("finetune.sbatch", {}, "HF_DIR: the Hugging Face directory"),
        ("preprocess.sbatch", {}, "INPUT: the JSON lines"),
        ("preprocess.sbatch", {"INPUT": "x"}, "DATA_PATH: the prefix"),
        ("preprocess.sbatch", {"INPUT": "x", "DATA_PATH": "y"}, "TOKENIZER_TYPE"),
    ],
)
def test_a_variable_that_is_not_set_is_named(tmp_path: Path, script: str, variables: dict[str, str], said: str) -> None:
    done = run_script(EXAMPLES / "slurm" / script, tmp_path, **variables)
    assert done.returncode != 0
    assert said in done.stderr
    assert not (tmp_path / "srun").exists()


def test_preprocessing_writes_what_training_reads(tmp_path: Path) -> None:
    given = {"INPUT": "data/*.jsonl", "DATA_PATH": "data/corpus_text_document", "SLURM_CPUS_PER_TASK": "16"}
    given |= {"TOKENIZER_TYPE": "GPTSentencePieceTokenizer", "TOKENIZER_MODEL": "tokenizer.model"}
    done = run_script(EXAMPLES / "slurm" / "preprocess.sbatch", tmp_path, **given)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "srun").read_text().split("\n")
    assert words[words.index("--input") + 1] == "data/*.jsonl"
    assert words[words.index("--output-prefix") + 1] == "data/corpus"
    assert words[words.index("--workers") + 1] == "16"
    recipe = yaml.safe_load(recipe_files("llama3.1-8b")[0].read_text())
    assert recipe["data"]["init_args"]["data_path"] == "data/corpus_text_document"
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes" / "preprocess.yaml").read_text())
    assert "--output-prefix=data/corpus" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_finetuning_begins_with_the_weights_and_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    for checkpoints, words in ((tmp_path / "none", []), (tmp_path / "some", ["--ckpt_path", "last"])):
        checkpoints.mkdir()
        if words:
            (checkpoints / "step=3.ckpt").mkdir()
        given = {"HF_DIR": "/models/llama", "CHECKPOINTS": str(checkpoints)}
        done = run_script(EXAMPLES / "slurm" / "finetune.sbatch", tmp_path, **given)
        assert done.returncode == 0, done.stderr
        said = (tmp_path / "srun").read_text().split("\n")
        assert said[said.index("--model.from_hf") + 1] == "/models/llama"
        assert ("--ckpt_path" in said) == bool(words)


# Manifests


@pytest.mark.parametrize("path", MANIFESTS, ids=names(MANIFESTS))
def test_a_manifest_is_valid(path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        is_manifest(manifest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["gaudi", "nvidia", "cpu"])
def test_one_file_for_every_device(tmp_path: Path, kind: str, device: str) -> None:
    cluster = section(tmp_path, device=device, kubernetes={"kind": kind, "namespace": "ml"})
    words = ["--recipe", "llama3.1-8b", "--config", cluster]
    manifest = yaml.safe_load(launched(*words, "--launcher", "kubernetes", "--dry-run"))
    is_manifest(manifest)
    replicas = next(value for name, value in manifest["spec"].items() if name.endswith("ReplicaSpecs"))
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    asked = {"gaudi": "habana.ai/gaudi", "nvidia": "nvidia.com/gpu"}.get(device)
    assert {name for name in resources["limits"] if "/" in name} == ({asked} if asked else set())
    assert ("hugepages-2Mi" in resources["limits"]) == (device == "gaudi")
    assert (pod.get("runtimeClassName") == "habana") == (device == "gaudi")
    (memory,) = (volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    assert memory == {"medium": "Memory", "sizeLimit": "10240Mi"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/training"}
    assert pod["terminationGracePeriodSeconds"] == 300
    assert manifest["metadata"]["namespace"] == "ml"
    for replica in replicas.values():
        program, *_, script = replica["template"]["spec"]["containers"][0]["command"]
        if program == "bash":
            is_clean(script)


def test_pods_without_an_image_and_folders_of_machines_are_refused(tmp_path: Path) -> None:
    cluster = section(tmp_path, image=None, mounts=["/a:/b"])
    words = ["--recipe", "llama3.1-8b", "--config", cluster]
    said = launched(*words, "--launcher", "kubernetes", "--dry-run", status=2)
    assert "cluster.image=None" in said
    assert "cluster.mounts" in said


def test_the_check_of_manifests_finds_mistakes() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())
    master = ("spec", "pytorchReplicaSpecs", "Master")
    for place, name, value in (
        (("spec",), "nprocPerNode", 8),
        ((*master,), "restartPolicyy", "Never"),
        ((*master,), "replicas", 2),
        (("metadata",), "name", "LLaMA"),
        ((), "apiVersion", "kubeflow.org/v2"),
    ):
        broken = deepcopy(job)
        part = broken
        for key in place:
            part = part[key]
        part[name] = value
        assert list(faults(broken)), name
    validate = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    pod["spec"] = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["spec"]["containers"][0]["mountPth"] = "/x"
    with pytest.raises(validate.ValidationError):
        validate.validate(pod, validate.latest_version(), strict=True)


# Every recipe under every launcher


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=pytest.mark.slow if number % 4 else ()) for number, recipe in enumerate(RECIPES)],
)
def test_every_recipe_under_every_launcher(tmp_path: Path, recipe: str) -> None:
    """The texts of golden/, with the recipe's name and sizes: nothing else depends on the recipe."""
    trainer = contents_of(recipe_files(recipe))["trainer"]
    devices, nodes = trainer["devices"], trainer.get("num_nodes", 1) * 2
    sizes = {"devices_per_node": devices, "nodes": nodes}
    texts = {}
    for kind in KINDS:
        cluster = section(tmp_path, **sizes, kubernetes={"kind": kind})
        texts[kind] = launched("--recipe", recipe, "--config", cluster, *how("kubernetes"))
        is_manifest(yaml.safe_load(texts[kind]))
    for tasks in ("device", "node"):
        texts[f"slurm-{tasks}"] = launched("--recipe", recipe, "--config", cluster, *how("slurm"), "--tasks", tasks)
        is_clean(texts[f"slurm-{tasks}"])
    (tmp_path / "hosts").write_text("".join(f"node{n} slots={devices}\n" for n in range(nodes)))
    for launcher in ("torchrun", "mpirun"):
        words = ["--recipe", recipe, "--config", cluster, *how(launcher), "--hostsfile", str(tmp_path / "hosts")]
        is_clean(launched(*words))
        texts[launcher] = launched(*words, *(["--node", "1"] if launcher == "torchrun" else []))
    values = {"RECIPE": recipe, "JOB": recipe.replace(".", "-"), "FOLDER": tmp_path}
    values |= {"NODES": nodes, "OTHERS": nodes - 1, "DEVICES": devices, "RANKS": nodes * devices}
    for name, text in texts.items():
        golden = (GOLDEN / f"{name.lower()}.txt").read_text()
        assert unbroken(text) == unbroken(re.sub("@([A-Z]+)@", lambda found: str(values[found[1]]), golden)), name


def unbroken(text: str) -> str:
    """A text with each command on one line: where it is broken depends on the length of its words."""
    return re.sub(r"\s*\\\n\s*", " ", text)


def how(launcher: str) -> tuple[str, ...]:
    return ("--launcher", launcher, "--dry-run")


TINY = ("--recipe", "llama-tiny")


def test_commands_for_machines_in_a_hostsfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    hosts = ("--hostsfile", str(tmp_path / "hosts"))
    text = launched(*TINY, *how("torchrun"), *hosts, "--", "--trainer.max_steps", "3")
    commands = [shlex.split(part.replace("\\\n", " ")) for part in text.split("# on ")[1:]]
    for number, words in enumerate(commands):
        assert words[0] == f"10.0.0.{number + 1}"
        given = dict(pairwise(words))
        assert [given[name] for name in ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr")] == [
            *("2", "2", str(number), "10.0.0.1")
        ]
        assert words[-2:] == ["--trainer.max_steps", "3"]
    assert "--node-rank 1" in launched(*TINY, *how("torchrun"), *hosts, "--node", "1")
    words = shlex.split(launched(*TINY, *how("mpirun"), *hosts).replace("\\\n", " "))
    assert words[:5] == ["mpirun", "-n", "4", "--hostfile", str(tmp_path / "hosts")]
    assert "MASTER_ADDR=10.0.0.1" in words


@pytest.mark.parametrize(
    ("hosts", "words", "said"),
    [
        ("a slots=2\nb slots=4\n", (), "equally many slots"),
        ("a slots=4\nb slots=4\n", (), "2 machines with 4 slots are 8 ranks, but the job has 4"),
        ("a slots=two\n", (), "hosts:1"),
        ("a\nb\n", ("--node", "2"), "--node=2"),
    ],
)
def test_hosts_that_cannot_be(tmp_path: Path, hosts: str, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "hosts").write_text(hosts)
    assert said in launched(*TINY, *how("torchrun"), "--hostsfile", str(tmp_path / "hosts"), *words, status=2)


def test_a_launcher_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for launcher, program in (("slurm", "sbatch"), ("mpirun", "mpirun")):
        assert f"{program} is not on PATH" in launched(*TINY, "--launcher", launcher, status=2)


def test_a_missing_hostsfile_is_named() -> None:
    assert "No such file" in launched(*TINY, *how("torchrun"), "--hostsfile", "/nowhere/hosts", status=2)
    nodes = launched(*TINY, "--config", "examples/clusters/slurm.yaml", *how("torchrun"), status=2)
    assert "cluster.hosts=None" in nodes


# Containers


def test_the_container_has_three_mounts_and_shared_memory() -> None:
    given = {"DATA": "/d", "CHECKPOINTS": "/c", "PATH": os.environ["PATH"]}
    for kind in ("gaudi", "cuda", "cpu"):
        done = subprocess.run(
            ["docker/run.sh", "--dry-run", kind, "doctor"], env=given, capture_output=True, text=True, check=True
        )
        words = done.stdout.split()
        assert [words[n + 1] for n, word in enumerate(words) if word == "-v"] == [
            f"{ROOT}:/workspace",
            "/d:/data",
            "/c:/checkpoints",
        ]
        assert words[-2:] == [f"lightning-megatron:{kind}", "doctor"]
        assert ("--shm-size=10g" in words) != ("--ipc=host" in words)
        assert (ROOT / "docker" / f"{kind}.Dockerfile").is_file()
    for variables, words, said in (
        (given, ["tpu", "doctor"], "tpu: no such kind"),
        (given, [], "usage:"),
        ({"PATH": given["PATH"]}, ["cpu", "doctor"], "DATA: the folder"),
    ):
        done = subprocess.run(["docker/run.sh", *words], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert said in done.stderr


@pytest.mark.parametrize("path", sorted(ROOT.glob("docker/*.Dockerfile")), ids=lambda path: path.name)
def test_a_dockerfile_copies_what_there_is_and_is_clean(path: Path) -> None:
    copied = [word for row in re.findall(r"^COPY (.*)$", path.read_text(), re.MULTILINE) for word in row.split()[:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    if hadolint := checker("hadolint"):
        done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_all_images_are_installed_by_the_lines_that_are_run_for_the_first() -> None:
    """tests/unit/machine/test_image.py runs those of the Gaudi image in an environment of its own."""
    lines = {
        path.name: re.findall(r"^(?:COPY|RUN python3 docker).*(?:\n    &&.*)*", path.read_text(), re.MULTILINE)
        for path in ROOT.glob("docker/*.Dockerfile")
    }
    assert len(lines["gaudi.Dockerfile"]) == 5
    without_slashes = {name: [line.replace(" \\", "") for line in found] for name, found in lines.items()}
    assert without_slashes["cpu.Dockerfile"] == without_slashes["gaudi.Dockerfile"]
    assert without_slashes["cuda.Dockerfile"] == without_slashes["gaudi.Dockerfile"]

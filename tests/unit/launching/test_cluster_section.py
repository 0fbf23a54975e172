from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.errors import ConfigError
from lightning_megatron.tools.cli.launch.recipe import read_job, refuse_unknown_partition
from lightning_megatron.tools.launching.cluster import Cluster, SlurmSection, cluster_of

ROOT = Path(__file__).parents[3]
LLAMA = str(ROOT / "lightning_megatron" / "tools" / "recipes" / "llama3.1-8b.yaml")


def faults(section: object, **variables: str) -> dict[str, str]:
    """Reason by argument."""
    with pytest.raises(ConfigError) as error:
        cluster_of(section, variables)
    return {problem.argument: str(problem) for problem in error.value.problems}


def test_a_section_as_a_cluster() -> None:
    section = {"nodes": 2, "slurm": {"gres": "gpu:8"}, "environment": {"FOO": "${HOME_OF_FOO}/bar"}}
    cluster = cluster_of(section, {"HOME_OF_FOO": "/foo"})
    assert (cluster.nodes, cluster.slurm.gres, cluster.environment) == (2, "gpu:8", {"FOO": "/foo/bar"})
    assert cluster_of({}, {}) == Cluster()
    assert cluster.world_size == 2


def test_all_faults_at_once_with_the_nearest_that_is_valid() -> None:
    section = {
        "name": "LLaMA 3.1",
        "nodes": 0,
        "device": "gaudy",
        "image": "${NO_SUCH_IMAGE}",
        "devices": 8,
        "mounts": ["data:/data"],
        "shared_memory": "10 apples",
        "environment": {"1FOO": "x", "BAR": 3},
        "slurm": {"time": "soon", "partion": "main", "tasks": "gpu"},
        "kubernetes": {"kind": "TrainJob"},
    }
    found = faults(section)
    assert set(found) == {
        "cluster.name",
        "cluster.nodes",
        "cluster.device",
        "cluster.image",
        "cluster.devices",
        "cluster.mounts",
        "cluster.shared_memory",
        "cluster.environment.1FOO",
        "cluster.environment.BAR",
        "cluster.slurm.time",
        "cluster.slurm.partion",
        "cluster.slurm.tasks",
        "cluster.kubernetes.kind",
    }
    for argument, word in {
        "cluster.name": "nearest valid: llama-3-1",
        "cluster.device": "gaudi",
        "cluster.image": "NO_SUCH_IMAGE is not set",
        "cluster.slurm.partion": "cluster.slurm.partition",
        "cluster.devices": "cluster.devices_per_node",
        "cluster.kubernetes.kind": "PyTorchJob",
    }.items():
        assert word in found[argument]


def test_sections_that_are_no_mappings() -> None:
    assert "mapping" in faults(["nodes"])["cluster"]
    assert "mapping" in faults({"slurm": "main"})["cluster.slurm"]


def test_sizes_of_the_recipe_are_those_of_the_machines_unless_the_section_says_otherwise(tmp_path: Path) -> None:
    assert read_job([LLAMA], [], {}).cluster == Cluster(name="llama3-1-8b", devices_per_node=8)
    (tmp_path / "cluster.yaml").write_text("cluster: {nodes: 3, devices_per_node: 4}\n")
    job = read_job([LLAMA, str(tmp_path / "cluster.yaml")], ["--trainer.max_steps", "3"], {})
    assert job.cluster.world_size == 12
    assert job.checkpoints == "out/llama3.1-8b/checkpoints"
    words = job.fit_words()
    assert words[words.index("--trainer.num_nodes") + 1] == "3"
    assert words[words.index("--trainer.devices") + 1] == "4"
    assert words[-2:] == ["--trainer.max_steps", "3"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": {"devices_per_node": 3}}, "tp=2"),
        ({"cluster": {"nodes": "four"}}, "cluster.nodes='four'"),
        ({"trainer": {"devices": "auto"}}, "give cluster.devices_per_node"),
        ({"cluster": "slurm"}, "must be a mapping"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(changes))
    with pytest.raises(ConfigError, match=said):
        read_job([LLAMA, str(tmp_path / "changes.yaml")], [], {})


def test_a_partition_that_the_site_does_not_have() -> None:
    cluster = Cluster(slurm=SlurmSection(partition="gaudi"))
    refuse_unknown_partition(cluster, [])  # no Slurm here
    refuse_unknown_partition(cluster, ["main", "gaudi"])
    with pytest.raises(ConfigError, match=r"partition='gaudi'.*nearest valid: main, gaudi2"):
        refuse_unknown_partition(cluster, ["main", "gaudi2"])

"""What manifests carry, and settings of pods in the places where Kubernetes expects them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from printed import KINDS, ROOT, is_manifest, launched, section

RECIPE = ROOT / "lightning_megatron" / "tools" / "recipes" / "llama-tiny.yaml"
HOW = ("--launcher", "kubernetes", "--dry-run")
TAINT = {"key": "gaudi", "operator": "Equal", "value": "yes", "effect": "NoSchedule", "tolerationSeconds": 60}
ANTI = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
AFFINITY = {"podAntiAffinity": ANTI}


def replicas_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in job["spec"].items() if key.endswith("ReplicaSpecs"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_carries_the_files_of_its_recipe(tmp_path: Path, kind: str) -> None:
    """Two files of one name, in their order; those that only describe the cluster stay away, names are in the image."""
    paths = [tmp_path / folder / "my recipe.yaml" for folder in "ab"]
    for path, text in zip(paths, (RECIPE.read_text(), "trainer: {max_steps: 3} # a change\n"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    cluster = section(tmp_path, nodes=2, devices_per_node=1, name="job", kubernetes={"kind": kind, "namespace": "ml"})
    words = ["--config", str(paths[0]), "--recipe", "llama-tiny", "--config", str(paths[1]), "--config", cluster]
    config_map, job = yaml.safe_load_all(launched(*words, *HOW))
    is_manifest(job)
    is_manifest(config_map)
    assert config_map["metadata"] == {"name": "job-recipe", "namespace": "ml"}
    assert config_map["data"] == {f"{2 * n}-my-recipe.yaml": path.read_text() for n, path in enumerate(paths)}
    pod = replicas_of(job)["Worker"]["template"]["spec"]
    (volume,) = [each["name"] for each in pod["volumes"] if each.get("configMap") == {"name": "job-recipe"}]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume]
    assert mount["readOnly"] is True
    first, *_ = replicas_of(job).values()
    script = first["template"]["spec"]["containers"][0]["command"][-1].replace(" \\\n    ", " ")
    place = mount["mountPath"]
    assert f"--config {place}/0-my-recipe.yaml --recipe llama-tiny --config {place}/2-my-recipe.yaml " in script
    assert str(tmp_path) not in yaml.safe_dump(job)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_pods_are_where_kubernetes_expects_them(tmp_path: Path, kind: str) -> None:
    settings = {
        "kind": kind,
        "instance_type": "p5.48xlarge",
        "node_selector": {"zone": "a"},
        "tolerations": [TAINT],
        "affinity": AFFINITY,
        "annotations": {"sidecar.istio.io/inject": "false"},
        "image_pull_secrets": ["registry"],
        "resources": {"vpc.amazonaws.com/efa": 32, "rdma/hca": 1},
        "capabilities": ["IPC_LOCK"],
    }
    cluster = section(tmp_path, device="gaudi", kubernetes=settings)
    job = yaml.safe_load(launched("--recipe", "llama3.1-8b", "--config", cluster, *HOW))
    is_manifest(job)
    for name, replica in replicas_of(job).items():
        template = replica["template"]
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert template["metadata"] == {"annotations": {"sidecar.istio.io/inject": "false"}}
        assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge", "zone": "a"}
        assert (pod["tolerations"], pod["affinity"]) == ([TAINT], AFFINITY)
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        if name != "Launcher":  # which has no device
            limits = container["resources"]["limits"]
            assert (limits["vpc.amazonaws.com/efa"], limits["rdma/hca"], limits["habana.ai/gaudi"]) == ("32", "1", "8")
            assert container["resources"]["requests"] == limits
            assert container["securityContext"]["capabilities"]["add"] == ["SYS_NICE", "IPC_LOCK"]


def test_settings_that_kubernetes_does_not_know_are_refused_all_at_once(tmp_path: Path) -> None:
    settings = {
        "node_selector": {"zone": 3},
        "tolerations": [{"efect": "NoSchedule"}],
        "affinity": {"nodesAffinity": {}},
        "annotations": {"a": True},
        "image_pull_secrets": "registry",
        "resources": {"cpu": 3, "rdma/hca": "many"},
    }
    cluster = section(tmp_path, device="gaudi", kubernetes=settings)
    said = launched("--recipe", "llama3.1-8b", "--config", cluster, *HOW, status=2)
    for place, advice in {
        "node_selector.zone=3": "'3'",
        "tolerations.0.efect='NoSchedule'": "nearest valid: tolerations.0.effect",
        "affinity.nodesAffinity={}": "nearest valid: affinity.nodeAffinity",
        "annotations.a=True": "quote it",
        "image_pull_secrets='registry'": "must be a list",
        "resources.cpu=3": "settings of their own",
        "resources.rdma/hca='many'": "a whole number",
    }.items():
        (line,) = [line for line in said.splitlines() if f"cluster.kubernetes.{place}" in line]
        assert advice in line


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    settings = {
        "instance_type": "p5.48xlarge",
        "node_selector": {"node.kubernetes.io/instance-type": "p4d.24xlarge"},
        "resources": {"habana.ai/gaudi": 4},
    }
    cluster = section(tmp_path, device="gaudi", kubernetes=settings)
    more = str(tmp_path / "more.yaml")
    said = launched("--recipe", "llama3.1-8b", "--config", cluster, *HOW, "--", "--config", more, status=2)
    for words in ("but cluster.kubernetes.node_selector has", "number is cluster.devices_per_node", "before `--`"):
        assert words in said

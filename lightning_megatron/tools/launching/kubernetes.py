"""Manifests for Kubernetes: a PyTorchJob with one ``torchrun`` a pod, or an MPIJob."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_megatron.errors import Problem, raise_if_any
from lightning_megatron.machine.byte_size import parse_bytes
from lightning_megatron.tools.launching.cluster import Cluster
from lightning_megatron.tools.launching.job import MODULE, OPTIONS, TrainingJob, option_lines, shell_line
from lightning_megatron.tools.recipes.names import is_file

Manifest = dict[str, Any]
_IMAGE = "cluster.image"
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_RECIPE = "/etc/lightning-megatron"
"""Folder of pods that has the recipe's files, from the job's ConfigMap."""
_END_RANKS = """\
pkill -TERM -f -- "-m [l]ightning_megatron" || true
while pkill -0 -f -- "-m [l]ightning_megatron"; do sleep 1; done
"""
_SAVING = 30
"""Seconds of the grace period that are reserved for the pod to shut down after its ranks have saved."""


@dataclass(frozen=True)
class _Kind:
    """Requirements of a kind of device in a pod.

    Attributes:
        resource: name of the device in Kubernetes; ``None`` for none.
        hugepages: memory in pages of 2 MiB.
        runtime_class: runtime class.
        variables: variables of its containers.
    """

    resource: str | None = None
    hugepages: str | None = None
    runtime_class: str | None = None
    variables: Mapping[str, str] | None = None


_KINDS: dict[str, _Kind] = {
    # Pages as in Intel's documentation of its device plugin; mpirun must not copy through the kernel in a container.
    "gaudi": _Kind("habana.ai/gaudi", "95000Mi", "habana", {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}),
    "nvidia": _Kind("nvidia.com/gpu"),
    "cpu": _Kind(),
}


def manifests(job: TrainingJob) -> list[Manifest]:
    """The manifests of a job: a ConfigMap with the recipe's files, if it has any, and the job itself.

    Raises:
        ConfigError: for a cluster without an image, and settings that pods cannot have.
        OSError: for a file that cannot be read.
    """
    raise_if_any(_problems(job))
    files = {_key(number, config): config for number, config in enumerate(job.configs) if is_file(config)}
    places = {config: f"{_RECIPE}/{key}" for key, config in files.items()}
    job = replace(job, configs=tuple(places.get(config, config) for config in job.configs))
    started = _mpi_job(job) if job.cluster.kubernetes.kind == "MPIJob" else _pytorch_job(job)
    if not files:
        return [started]
    metadata = _metadata(job.cluster) | {"name": _recipe_name(job.cluster)}
    texts = {key: Path(config).read_text() for key, config in files.items()}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": texts}, started]


def _key(number: int, config: str) -> str:
    """Name of a recipe's file in a ConfigMap, which allows few characters."""
    return f"{number}-{re.sub('[^-._a-zA-Z0-9]+', '-', Path(config).name)}"


def _recipe_name(cluster: Cluster) -> str:
    return f"{cluster.name}-recipe"


def _problems(job: TrainingJob) -> list[Problem]:
    cluster, section = job.cluster, job.cluster.kubernetes
    found = [
        Problem("-- --config", word, "is a file that pods do not have: give it before `--`")
        for word in job.arguments
        if word.partition("=")[0] in ("--config", "-c")
    ]
    device = _KINDS[cluster.device].resource
    if device is not None and device in section.resources:
        reason = "is the device itself: its number is cluster.devices_per_node"
        found.append(Problem(f"cluster.kubernetes.resources.{device}", section.resources[device], reason))
    labelled = section.node_selector.get(_INSTANCE_TYPE, section.instance_type)
    if section.instance_type not in (None, labelled):
        reason = f"but cluster.kubernetes.node_selector has {labelled!r}: give one of them"
        found.append(Problem("cluster.kubernetes.instance_type", section.instance_type, reason))
    if cluster.image is None:
        found.append(Problem(_IMAGE, None, "pods need an image: see docker/"))
    if cluster.mounts:
        reason = "are folders of a machine; pods see those of the claim in cluster.kubernetes.claim"
        found.append(Problem("cluster.mounts", cluster.mounts, reason))
    if cluster.hosts is not None:
        found.append(Problem("cluster.hosts", cluster.hosts, "pods have names of their own"))
    return found


# A PyTorchJob


def _pytorch_job(job: TrainingJob) -> Manifest:
    cluster = job.cluster
    replicas: Manifest = {"Master": _replica(job, 1)}
    if cluster.nodes > 1:
        replicas["Worker"] = _replica(job, cluster.nodes - 1)
    spec = {
        "nprocPerNode": str(cluster.devices_per_node),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": 1000},
        "pytorchReplicaSpecs": replicas,
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _metadata(cluster), "spec": spec}


def _replica(job: TrainingJob, count: int) -> Manifest:
    script = _torchrun_script(job)
    container = _container(job, "pytorch", ["bash", "-euo", "pipefail", "-c", script])
    container["ports"] = [{"name": "pytorchjob-port", "containerPort": 23456}]
    # torchrun ends with 1 whatever the status of a rank: so OnFailure, not ExitCode.
    return {"replicas": count, "restartPolicy": "OnFailure", "template": _template(job, _pod(job, container))}


def _torchrun_script(job: TrainingJob) -> str:
    """The commands of a pod: sizes and addresses are variables that the operator sets (PET_NNODES and so on)."""
    python = shlex.quote(job.cluster.python)
    wait = max(job.cluster.grace - _SAVING, 1)
    return (
        'ulimit -n "$(ulimit -H -n)"\n'
        f"{_words(job)}\n"
        "run=()\n"
        f"if {python} -m torch.distributed.run --help | grep shutdown-timeout >/dev/null; then\n"
        f"  run=(--shutdown-timeout {wait})\n"
        "fi\n"
        f'exec {python} -m torch.distributed.run "${{run[@]}}" -m {MODULE} "${{words[@]}}"\n'
    )


def _words(job: TrainingJob) -> str:
    """Lines that make the words for ``fit``; variables of the pod replace sizes of the recipe."""
    return f"words=({shell_line(job.first_words())})\n{option_lines(OPTIONS)}"


# An MPIJob


def _mpi_job(job: TrainingJob) -> Manifest:
    cluster = job.cluster
    words = [
        *("mpirun", "-n", str(cluster.world_size), "--allow-run-as-root", "--map-by", "slot", "--bind-to", "none"),
        *("--wdir", cluster.kubernetes.claim_path),  # without it, ranks begin where the launcher does
        *(word for name in _variables(cluster) for word in ("-x", name)),
    ]
    script = (
        'MASTER_ADDR=$(sed -n "s/[ :].*//;1p" "${OMPI_MCA_orte_default_hostfile:?the MPI operator sets it}")\n'
        f"export MASTER_ADDR MASTER_PORT={cluster.port}\n"
        f"{_words(job)}\n"
        f"{shell_line([*words, '-x', 'MASTER_ADDR', '-x', 'MASTER_PORT'])} \\\n"
        f'    {shlex.quote(cluster.python)} -m {MODULE} "${{words[@]}}" &\n'
        "ranks=$!\n"
        "# mpirun passes SIGUSR1 on; after SIGTERM it would kill ranks within a second.\n"
        "trap 'kill -USR1 \"$ranks\"' TERM\n"
        "status=0\n"
        'while kill -0 "$ranks" 2>/dev/null; do\n'
        "  status=0\n"
        '  wait "$ranks" || status=$?\n'
        "done\n"
        'exit "$status"\n'
    )
    launcher = {
        "name": "launcher",
        "image": cluster.image,
        "command": ["bash", "-euo", "pipefail", "-c", script],
        "env": _env(cluster),
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
    }
    worker = _container(job, "worker", ["/usr/sbin/sshd", "-De"])
    hook = {"exec": {"command": ["bash", "-c", _END_RANKS]}}
    worker["lifecycle"] = {"preStop": hook}  # sshd, the pod's first process, does not pass the signal on to the ranks
    spec = {
        "slotsPerWorker": cluster.devices_per_node,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 1000},
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "OnFailure",
                "template": _template(job, {"terminationGracePeriodSeconds": cluster.grace, "containers": [launcher]}),
            },
            "Worker": {"replicas": cluster.nodes, "template": _template(job, _pod(job, worker))},
        },
    }
    return {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": _metadata(cluster), "spec": spec}


# Parts of both


def _metadata(cluster: Cluster) -> Manifest:
    found: Manifest = {"name": cluster.name}
    return found if cluster.kubernetes.namespace is None else found | {"namespace": cluster.kubernetes.namespace}


def _variables(cluster: Cluster) -> dict[str, str]:
    return {**(_KINDS[cluster.device].variables or {}), **cluster.environment}


def _env(cluster: Cluster) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in sorted(_variables(cluster).items())]


def _container(job: TrainingJob, name: str, command: list[str]) -> Manifest:
    cluster, section = job.cluster, job.cluster.kubernetes
    kind = _KINDS[cluster.device]
    # Devices and pages cannot be overcommitted, so requests equal limits.
    resources = {"cpu": str(section.cpu), "memory": section.memory}
    if kind.resource is not None:
        resources[kind.resource] = str(cluster.devices_per_node)
    pages = section.hugepages or kind.hugepages
    if pages is not None:
        resources["hugepages-2Mi"] = pages
    resources |= {name: str(count) for name, count in section.resources.items()}
    found: Manifest = {
        "name": name,
        "image": cluster.image,
        "command": command,
        "workingDir": section.claim_path,
        "env": _env(cluster),
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [
            {"name": "training", "mountPath": section.claim_path},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if _has_files(job):
        found["volumeMounts"].append({"name": "recipe", "mountPath": _RECIPE, "readOnly": True})
    capabilities = [*(["SYS_NICE"] if cluster.device == "gaudi" else []), *section.capabilities]
    if capabilities:
        found["securityContext"] = {"capabilities": {"add": capabilities}}
    return found


def _has_files(job: TrainingJob) -> bool:
    return any(map(is_file, job.configs))


def _template(job: TrainingJob, pod: Manifest) -> Manifest:
    """A pod with its annotations, its image's secrets, and the nodes that it may run on."""
    section = job.cluster.kubernetes
    instance = {} if section.instance_type is None else {_INSTANCE_TYPE: section.instance_type}
    given = {
        "imagePullSecrets": [{"name": name} for name in section.image_pull_secrets],
        "nodeSelector": {**instance, **section.node_selector},
        "tolerations": section.tolerations,
        "affinity": section.affinity,
    }
    template = {"spec": pod | {name: value for name, value in given.items() if value}}
    return {"metadata": {"annotations": section.annotations}, **template} if section.annotations else template


def _pod(job: TrainingJob, container: Manifest) -> Manifest:
    cluster, section = job.cluster, job.cluster.kubernetes
    size = f"{parse_bytes(cluster.shared_memory) >> 20}Mi"
    pod: Manifest = {
        "terminationGracePeriodSeconds": cluster.grace,
        "containers": [container],
        "volumes": [
            {"name": "training", "persistentVolumeClaim": {"claimName": section.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        ],
    }
    if _has_files(job):
        pod["volumes"].append({"name": "recipe", "configMap": {"name": _recipe_name(cluster)}})
    runtime_class = section.runtime_class or _KINDS[cluster.device].runtime_class
    if runtime_class is not None:
        pod["runtimeClassName"] = runtime_class
    if cluster.device == "gaudi":
        pod["hostIPC"] = True
    return pod

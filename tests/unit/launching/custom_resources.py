"""Fields of the two kinds of job that Kubernetes itself does not know, and rules of their operators.

Kept by hand after the definitions of Kubeflow's training operator v1.9 (``kubeflow.org/v1`` PyTorchJob) and MPI
operator v0.6 (``kubeflow.org/v2beta1`` MPIJob). Pod templates are not here: Kubernetes' own schemas check them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_RUN_POLICY = {
    "cleanPodPolicy": ("None", "Running", "All"),
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "suspend": bool,
}
_REPLICA = {
    "replicas": int,
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "template": dict,
}
_RESTART_OF_MPI = ("Never", "OnFailure")
FIELDS: dict[str, dict[str, Any]] = {
    "PyTorchJob": {
        "nprocPerNode": str,
        "runPolicy": _RUN_POLICY,
        "pytorchReplicaSpecs": {"Master": _REPLICA, "Worker": _REPLICA},
        "elasticPolicy": dict,
    },
    "MPIJob": {
        "slotsPerWorker": int,
        "runPolicy": _RUN_POLICY,
        "mpiReplicaSpecs": {"Launcher": _REPLICA, "Worker": _REPLICA},
        "sshAuthMountPath": str,
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
    },
}
VERSIONS = {"PyTorchJob": "kubeflow.org/v1", "MPIJob": "kubeflow.org/v2beta1"}
_REPLICAS = {"PyTorchJob": "pytorchReplicaSpecs", "MPIJob": "mpiReplicaSpecs"}
_CONTAINERS = {"PyTorchJob": "pytorch"}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def faults(job: dict[str, Any]) -> Iterator[str]:
    """Faults of a manifest outside of its pods."""
    kind = job.get("kind", "")
    if job.get("apiVersion") != VERSIONS.get(kind):
        yield f"apiVersion {job.get('apiVersion')!r} of {kind!r}"
        return
    yield from (f"unknown {name}" for name in job.keys() - {"apiVersion", "kind", "metadata", "spec"})
    if not _DNS_1035.fullmatch(job["metadata"]["name"]):
        yield f"name {job['metadata']['name']!r}"
    yield from _differences(job["spec"], FIELDS[kind], "spec")
    replicas = job["spec"][_REPLICAS[kind]]
    first = "Master" if kind == "PyTorchJob" else "Launcher"
    if replicas.get(first, {}).get("replicas") != 1:
        yield f"{first} has not one replica"
    if "Worker" in replicas and replicas["Worker"]["replicas"] < 1:
        yield "Worker has no replica"
    if kind == "MPIJob" and replicas[first]["restartPolicy"] not in _RESTART_OF_MPI:
        yield "restartPolicy of an MPIJob"
    wanted = _CONTAINERS.get(kind)
    for name, replica in replicas.items():
        containers = [container["name"] for container in replica["template"]["spec"]["containers"]]
        if wanted is not None and wanted not in containers:
            yield f"{name} has no container {wanted!r}, which the operator gives its variables"


def _differences(given: Any, known: Any, place: str) -> Iterator[str]:
    if isinstance(known, dict):
        if not isinstance(given, dict):
            yield f"{place} is no mapping"
            return
        for name, value in given.items():
            if name not in known:
                yield f"unknown {place}.{name}"
            else:
                yield from _differences(value, known[name], f"{place}.{name}")
    elif isinstance(known, tuple):
        if given not in known:
            yield f"{place}: {given!r} is none of {known}"
    elif type(given) is not known:
        yield f"{place}: {given!r} is no {known.__name__}"

"""The ``cluster`` section of a recipe, with every fault of it at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal

from lightning_megatron.arguments import Check, Rules, at_least, field_problems, unknown_name
from lightning_megatron.errors import ConfigError, Problem, is_whole, raise_if_any
from lightning_megatron.machine.byte_size import parse_bytes

Device = Literal["gaudi", "nvidia", "cpu"]
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+")


def _name_problems(name: str) -> list[Problem]:
    if _NAME.fullmatch(name):
        return []
    nearest = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").lstrip("0123456789-")[:42]
    reason = "must be a DNS label: a letter, then at most 41 lower-case letters, digits and hyphens"
    return [Problem("name", name, reason, (nearest,) if _NAME.fullmatch(nearest) else ())]


def _size_problems(text: str) -> list[Problem]:
    try:
        parse_bytes(text)
    except ValueError as error:
        return [Problem("shared_memory", text, str(error))]
    return []


def _mount_problems(mounts: list[str]) -> list[Problem]:
    reason = "must be SOURCE:TARGET, or SOURCE:TARGET:ro, with absolute paths"
    return [
        Problem("mounts", mount, reason) for mount in mounts if not re.fullmatch(r"/[^:\s]*:/[^:\s]*(:(ro|rw))?", mount)
    ]


def _time_problems(text: str) -> list[Problem]:
    return [] if _TIME.fullmatch(text) else [Problem("time", text, "must be Slurm's: 90, 12:00:00 or 2-00:00:00")]


def _variable_problems(environment: Mapping[str, object]) -> list[Problem]:
    found = [
        Problem(f"environment.{name}", value, "is not a valid name of a variable")
        for name, value in environment.items()
        if not _VARIABLE_NAME.fullmatch(str(name))
    ]
    return found + _text_problems("environment", environment)


def _text_problems(place: str, given: Mapping[str, object]) -> list[Problem]:
    return [
        Problem(f"{place}.{name}", value, "must be text: quote it", (f"'{value}'",))
        for name, value in given.items()
        if not isinstance(value, str)
    ]


def _resource_problems(resources: Mapping[str, object]) -> list[Problem]:
    wrong_name = "must have a domain, as vpc.amazonaws.com/efa has: cpu, memory and hugepages are settings of their own"
    found = [Problem(f"resources.{name}", count, wrong_name) for name, count in resources.items() if "/" not in name]
    return found + [
        Problem(f"resources.{name}", count, "must be a whole number of at least 1", (1,))
        for name, count in resources.items()
        if not is_whole(count, at_least=1)
    ]


def _key_problems(place: str, given: Mapping[str, object], known: Sequence[str]) -> list[Problem]:
    places = [f"{place}.{key}" for key in known]
    return [unknown_name(f"{place}.{key}", value, "key", places) for key, value in given.items() if key not in known]


def _toleration_problems(tolerations: list[Mapping[str, object]]) -> list[Problem]:
    known = ("key", "operator", "value", "effect", "tolerationSeconds")
    return [p for number, given in enumerate(tolerations) for p in _key_problems(f"tolerations.{number}", given, known)]


def _affinity_problems(affinity: Mapping[str, object]) -> list[Problem]:
    return _key_problems("affinity", affinity, ("nodeAffinity", "podAffinity", "podAntiAffinity"))


@dataclass(frozen=True)
class SlurmSection:
    """Settings of a batch script.

    Attributes:
        tasks: ``"device"`` for one Slurm task per device; ``"node"`` for one ``torchrun`` per node.
        partition: partition; ``None`` for the site's default.
        account: account to charge; ``None`` for the user's default.
        qos: quality of service; ``None`` for the user's default.
        time: time limit as Slurm writes it.
        gres: devices of a node in the site's words, such as ``gpu:8``; ``None`` asks for none.
        cpus_per_task: cores of a task; ``None`` for the site's default.
        exclusive: True to share nodes with no other job.
    """

    tasks: Literal["device", "node"] = "device"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "1-00:00:00"
    gres: str | None = None
    cpus_per_task: int | None = None
    exclusive: bool = True

    RULES: ClassVar[Rules] = {"cpus_per_task": at_least(1), "time": Check(_time_problems)}


@dataclass(frozen=True)
class KubernetesSection:
    """Settings of a manifest.

    Attributes:
        kind: ``"PyTorchJob"``, with one ``torchrun`` per pod, or ``"MPIJob"``, whose launcher runs ``mpirun``.
        namespace: namespace of the job; ``None`` for the one of the context.
        claim: persistent volume claim that all pods mount, for data, checkpoints and logs.
        claim_path: path at which they mount it.
        cpu: cores of a pod.
        memory: memory of a pod.
        hugepages: memory in pages of 2 MiB; ``None`` for what the device needs.
        runtime_class: runtime class; ``None`` for what the device needs.
        resources: further resources of a pod with devices and their number, such as ``vpc.amazonaws.com/efa: 32``.
        capabilities: Linux capabilities of containers, in addition to what the device needs.
        instance_type: type of the nodes by the label ``node.kubernetes.io/instance-type``; ``None`` for any.
        node_selector: labels that nodes must have.
        tolerations: taints of nodes that do not keep pods away, as Kubernetes writes them.
        affinity: affinity of pods, as Kubernetes writes it.
        annotations: annotations of pods.
        image_pull_secrets: names of secrets for the image's registry.
    """

    kind: Literal["PyTorchJob", "MPIJob"] = "PyTorchJob"
    namespace: str | None = None
    claim: str = "training"
    claim_path: str = "/training"
    cpu: int = 16
    memory: str = "64Gi"
    hugepages: str | None = None
    runtime_class: str | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    instance_type: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: list[Mapping[str, Any]] = field(default_factory=list)
    affinity: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    image_pull_secrets: list[str] = field(default_factory=list)

    RULES: ClassVar[Rules] = {
        "cpu": at_least(1),
        "resources": Check(_resource_problems),
        "node_selector": Check(partial(_text_problems, "node_selector")),
        "tolerations": Check(_toleration_problems),
        "affinity": Check(_affinity_problems),
        "annotations": Check(partial(_text_problems, "annotations")),
    }


@dataclass(frozen=True)
class Cluster:
    """Machines of a job, and how it is started on them.

    Attributes:
        name: name of the job.
        nodes: machines.
        devices_per_node: devices, and so processes, of each.
        device: kind of device.
        image: container image; ``None`` for the environment that the job is started in.
        mounts: folders of the machine in containers, as ``SOURCE:TARGET``.
        shared_memory: size of ``/dev/shm`` in containers.
        grace: seconds between the signal that ends a job and its end, for it to save a checkpoint.
        python: interpreter.
        port: rendezvous port (``MASTER_PORT``).
        hosts: hostsfile; ``None`` for this machine alone.
        ssh_port: port of the machines' ssh; ``None`` for 22.
        environment: variables of the job.
        slurm: settings of a batch script.
        kubernetes: settings of a manifest.
    """

    name: str = "training"
    nodes: int = 1
    devices_per_node: int = 1
    device: Device = "cpu"
    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    shared_memory: str = "10GiB"
    grace: int = 300
    python: str = "python3"
    port: int = 29500
    hosts: str | None = None
    ssh_port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    slurm: SlurmSection = field(default_factory=SlurmSection)
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)

    RULES: ClassVar[Rules] = {
        "name": Check(_name_problems),
        "nodes": at_least(1),
        "devices_per_node": at_least(1),
        "grace": at_least(30),
        "port": at_least(1024),
        "ssh_port": at_least(1),
        "mounts": Check(_mount_problems),
        "shared_memory": Check(_size_problems),
        "environment": Check(_variable_problems),
    }

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.devices_per_node


def cluster_of(section: object, variables: Mapping[str, str] = os.environ) -> Cluster:
    """A cluster from the ``cluster`` section of a recipe, in which ``${NAME}`` stands for a variable.

    Raises:
        ConfigError: with every unknown key, every invalid value, and every variable that is not set.
    """
    if not isinstance(section, Mapping):
        raise ConfigError([Problem("cluster", section, "must be a mapping: see examples/clusters")])
    found: list[Problem] = []
    filled: dict[str, Any] = _filled(section, "cluster", variables, found)
    parts: dict[str, Any] = {}
    for name, kind in (("slurm", SlurmSection), ("kubernetes", KubernetesSection)):
        parts[name] = _part(filled.get(name) or {}, f"cluster.{name}", kind, found)
    own = {name: value for name, value in filled.items() if name not in parts}
    cluster = _part(own, "cluster", Cluster, found, parts)
    raise_if_any(found)
    return cluster


def _part(given: object, place: str, kind: Any, found: list[Problem], more: Mapping[str, Any] | None = None) -> Any:
    """A section as a dataclass; its faults are added to ``found``, and their values left at the default."""
    if not isinstance(given, Mapping):
        found.append(Problem(place, given, "must be a mapping"))
        given = {}
    names = [each.name for each in fields(kind)]
    unknown = [name for name in given if name not in names]
    found += [
        unknown_name(f"{place}.{name}", given[name], "setting", [f"{place}.{n}" for n in names]) for name in unknown
    ]
    known = {name: value for name, value in given.items() if name not in unknown}
    rules: Rules = kind.RULES
    problems = field_problems(kind(**known), rules)
    found += [Problem(f"{place}.{p.argument}", p.value, p.reason, p.nearest) for p in problems]
    wrong = {problem.argument for problem in problems}
    return kind(**{name: value for name, value in known.items() if name not in wrong}, **(more or {}))


def _filled(value: Any, place: str, variables: Mapping[str, str], found: list[Problem]) -> Any:
    """A value in which variables are replaced, at any depth."""
    if isinstance(value, Mapping):
        return {name: _filled(item, f"{place}.{name}", variables, found) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, f"{place}.{number}", variables, found) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    for match in _VARIABLE.finditer(value):
        if not variables.get(match["name"]):
            found.append(Problem(place, value, f"the environment variable {match['name']} is not set"))
    return _VARIABLE.sub(lambda match: variables.get(match["name"], ""), value)

"""Device files: figures of one kind of device and its links, from a datasheet or a calibration.

A device file is JSON. :func:`load_device` finds those of ``devices/`` by name; ``plan --calibrate`` writes another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from lightning_megatron.arguments import Rules, above, at_least, field_problems
from lightning_megatron.errors import Problem, nearest_names, raise_if_any

FOLDER = Path(__file__).parents[1] / "devices"
DTYPES = ("fp32", "bf16", "fp8")
"""Names of the number formats in which a device multiplies; fp16 counts as bf16."""


@dataclass(frozen=True)
class Link:
    """A path between devices.

    Attributes:
        bandwidth: bytes a second in one direction, while the same number travels in the other.
        latency: seconds of one message, however small.
    """

    bandwidth: float
    latency: float

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        return field_problems(self, {"bandwidth": above(0.0), "latency": at_least(0.0)})


@dataclass(frozen=True)
class Efficiency:
    """The three fitted constants of a device and a number format.

    Attributes:
        matmul: share of the peak FLOP/s that a large matrix product reaches.
        attention: share of the peak FLOP/s that fused attention reaches, forward and backward together.
        memory: share of the memory bandwidth that memory-bound kernels reach.
    """

    matmul: float
    attention: float
    memory: float

    def problems(self) -> list[Problem]:
        """Every fault of the fields."""
        return field_problems(self, dict.fromkeys(("matmul", "attention", "memory"), above(0.0)))


_RULES: Rules = {
    "memory_bytes": at_least(1),
    "workspace_bytes": at_least(0),
    "communicator_bytes": at_least(0),
    "memory_bandwidth": above(0.0),
    "devices_per_node": at_least(1),
    "link_efficiency": above(0.0),
    "kernel_seconds": at_least(0.0),
    "step_seconds": at_least(0.0),
}


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device, with the links of a typical node.

    Attributes:
        name: name on the command line.
        title: full name.
        memory_bytes: memory of one device.
        workspace_bytes: part of the memory that driver and libraries take, which tensors cannot use.
        flops: peak FLOP/s of dense matrix products by number format, of :data:`DTYPES`.
        memory_bandwidth: bytes a second.
        devices_per_node: devices that the fast link joins.
        within_node: link inside a node.
        between_nodes: link between nodes, of one device.
        efficiency: fitted constants by number format.
        link_efficiency: share of a link's bandwidth that a collective reaches.
        kernel_seconds: time in which the host starts one kernel.
        step_seconds: time of a step in the host's own loop.
        asynchronous: True if the host launches kernels ahead, and communication overlaps with computation.
        adds_products: True if one kernel adds a product to an fp32 sum, so that layers add weight gradients themselves.
        communicator_bytes: memory that the library of collectives takes for each communicator of a rank.
        sources: origin of each figure.
    """

    name: str
    title: str
    memory_bytes: int
    workspace_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    devices_per_node: int
    within_node: Link
    between_nodes: Link
    efficiency: Mapping[str, Efficiency]
    link_efficiency: float = 0.8
    kernel_seconds: float = 5e-6
    step_seconds: float = 2e-3
    asynchronous: bool = True
    adds_products: bool = False
    communicator_bytes: int = 0
    sources: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        found = field_problems(self, _RULES, leave=("flops", "efficiency", "within_node", "between_nodes", "sources"))
        for name in ("flops", "efficiency"):
            table: Mapping[str, object] = getattr(self, name)
            found += [Problem(name, key, "no number format", DTYPES) for key in table if key not in DTYPES]
            if "bf16" not in table and "fp32" not in table:
                found.append(Problem(name, dict(table), "needs a figure for bf16 or fp32", ("bf16", "fp32")))
        parts: tuple[Link | Efficiency, ...] = (self.within_node, self.between_nodes, *self.efficiency.values())
        found += [problem for part in parts for problem in part.problems()]
        raise_if_any(found)

    def __hash__(self) -> int:
        return hash((self.name, self.title, self.memory_bytes, tuple(sorted(self.efficiency.items(), key=str))))

    def peak(self, dtype: str) -> float:
        """FLOP/s of a number format, or of the nearest one that has a figure."""
        return self.flops[self._known(dtype, self.flops)]

    def constants(self, dtype: str) -> Efficiency:
        """Fitted constants of a number format, or of the nearest one that has any."""
        return self.efficiency[self._known(dtype, self.efficiency)]

    @staticmethod
    def _known(dtype: str, table: Mapping[str, object]) -> str:
        if dtype in table:
            return dtype
        order = {"fp8": ("bf16", "fp32"), "bf16": ("fp32",), "fp32": ("bf16",)}[dtype]
        return next(name for name in order if name in table)

    @property
    def caveat(self) -> str | None:
        """The origin of the constants if it says that they were not fitted; ``None`` if they were, or it is unknown."""
        return next((source for source in self.sources if source.startswith("efficiency: not fitted")), None)

    @property
    def usable_bytes(self) -> int:
        """Memory for tensors."""
        return self.memory_bytes - self.workspace_bytes

    def write(self, path: str | Path) -> None:
        """Write a device file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")


def device_names() -> list[str]:
    """Names of the devices that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load_device(name: str) -> DeviceSpec:
    """Load a device by its name, or from a device file.

    Args:
        name: name in :func:`device_names`, or the path of a device file.

    Raises:
        ConfigError: for an unknown name; for a faulty file, with every fault.
    """
    path = FOLDER / f"{name}.json"
    if not path.exists():
        path = Path(name)
        if path.suffix != ".json" and not path.is_file():
            raise_if_any([Problem("device", name, "unknown device", nearest_names(name, device_names()))])
    return read_device(path)


def read_device(path: str | Path) -> DeviceSpec:
    """Read a device file.

    Raises:
        ConfigError: with every fault of the file.
    """
    try:
        given = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise_if_any([Problem("device", str(path), f"cannot be read as a device file: {error}")])
    known = {each.name for each in fields(DeviceSpec)}
    found = [
        Problem(f"device file: {name}", given[name], "no such field", nearest_names(name, sorted(known)))
        for name in given
        if name not in known
    ]
    missing = sorted(each.name for each in fields(DeviceSpec) if each.default is MISSING and each.name not in given)
    raise_if_any(found + [Problem(f"device file: {name}", None, f"{path} has none") for name in missing])
    return DeviceSpec(**_parts(given))


def _parts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a device, with nested objects converted to :class:`Link` and :class:`Efficiency`."""
    made = {**given, "sources": tuple(given.get("sources", ()))}
    try:
        made["within_node"], made["between_nodes"] = Link(**given["within_node"]), Link(**given["between_nodes"])
        made["efficiency"] = {dtype: Efficiency(**each) for dtype, each in given["efficiency"].items()}
    except TypeError as error:
        raise_if_any([Problem("device file", given.get("name"), str(error))])
    return made

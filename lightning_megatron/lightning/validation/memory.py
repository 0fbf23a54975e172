"""Memory of a job and of its devices, as far as it is known before processes start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.errors import Problem
from lightning_megatron.lightning.validation.settings import JobSettings
from lightning_megatron.machine.byte_size import memory_bytes


@dataclass(frozen=True)
class TrainedModel:
    """The properties of a module's trained model on which memory depends.

    Attributes:
        config: its shape; all parameters are trained.
        optimizer_states: values that the optimizer keeps for each parameter; ``None`` if unknown.
    """

    config: TransformerConfig
    optimizer_states: int | None


@runtime_checkable
class HasTrainedModel(Protocol):
    """A module that knows, before it is built, what it trains."""

    @property
    def trained_model(self) -> TrainedModel | None:
        """The model; ``None`` if a subclass builds another one."""
        ...


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of a device for the tensors of a rank.

    Attributes:
        size: bytes; ``None`` if unknown.
        device: name of the device, as its software reports it.
        asked: True if the user has given the size as ``max_memory``.
    """

    size: int | None = None
    device: str = ""
    asked: bool = False


UNKNOWN = MemoryLimit()


def limit_of(settings: JobSettings, device_bytes: int | None, name: str) -> MemoryLimit:
    """Memory that a rank may use: the user's ``max_memory``, else the memory of the device."""
    asked = memory_bytes(settings.max_memory)
    return MemoryLimit(device_bytes if asked is None else asked, name, asked is not None)


class MemoryForecast:
    """Memory that a run will need. This one knows nothing; ``extensions.py`` names the function that makes others."""

    def problems(self) -> list[Problem]:
        """The fault of a layout that does not fit, with changes that would make it fit."""
        return []

    def announce(self, name: str) -> None:
        """Log the forecast in one line, after the strategy's name."""

    def measure(self, name: str, step: int, device: torch.device, pipeline_rank: int) -> None:
        """Log once the measured peak of the first steps beside the forecast; ``step`` counts optimizer steps."""

    def explain(self, error: BaseException) -> None:
        """Add the forecast and the cheapest ways out to an out-of-memory error."""

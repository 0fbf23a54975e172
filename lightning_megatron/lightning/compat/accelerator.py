"""Accelerator for Gaudi, which Lightning itself no longer has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.compat._private import trainer_argument

NAME = devices.HPU.type


class HPUAccelerator(Accelerator):
    """Intel Gaudi cards, which ``Trainer(accelerator=...)`` knows as ``NAME``.

    Methods are those of Intel's archived lightning-habana. One process has one card, which always has index 0 there.
    ``HABANA_VISIBLE_MODULES`` limits the cards that a job may take: a pair (``0,1``, ``2,3``, ``4,5`` or ``6,7``) or
    half a node (``0,1,2,3`` or ``4,5,6,7``).
    """

    def setup_device(self, device: torch.device) -> None:
        """Check that a device is a Gaudi.

        Raises:
            ConfigError: if it is not.
        """
        if device.type != NAME:
            raise ConfigError([Problem("device", str(device), f"{type(self).__name__} drives other devices", (NAME,))])

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """The allocator's counters under Gaudi's names: ``InUse``, ``MaxInUse``, ``Limit`` ..., in bytes."""
        return dict(
            devices.memory_statistics(torch.device(NAME, device) if isinstance(device, int) else torch.device(device))
        )

    def teardown(self) -> None:
        """No action: Gaudi has no cache to empty."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Number of cards asked for.

        Raises:
            ConfigError: for a list of cards, a value that is not a number, or more cards than a job may take here.
        """
        if isinstance(devices, list | tuple):
            raise ConfigError([_numbered_cards(list(devices))])
        try:
            number = int(devices)
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError([Problem("devices", devices, "must be a number of cards from 1 on, or 'auto'", (1, 8))])
        most = HPUAccelerator.auto_device_count() if HPUAccelerator.is_available() else number
        if number > most:
            raise ConfigError([_too_many_cards(number, most)])
        return number

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """One device per process, all with index 0, which every process uses."""
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Cards of this node that ``HABANA_VISIBLE_MODULES`` permits, all of them if it is not set."""
        return devices.device_count(devices.HPU)

    @staticmethod
    def is_available() -> bool:
        """True if Gaudi's software is installed and sees a card."""
        return devices.hpu_available()

    @staticmethod
    def get_device_name(device: str | torch.device = NAME) -> str:
        """``GAUDI2``, ``GAUDI3``."""
        return devices.device_name(torch.device(device))

    @staticmethod
    def name() -> str:
        """Name in ``Trainer(accelerator=...)``."""
        return NAME

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Register the name, unless lightning-habana has registered it already."""
        if NAME not in accelerator_registry:
            accelerator_registry.register(NAME, cls, description=str(cls.__doc__).splitlines()[0])


def _numbered_cards(cards: list[Any]) -> Problem:
    """The fault of ``devices=[4, 5]``, with the environment variable that selects these cards."""
    text = ",".join(map(str, cards))
    allowed = devices.allowed_modules(len(cards))
    chosen = (text,) if text in allowed else allowed
    nearest = tuple(f"{each.count(',') + 1}, with {devices.VISIBLE}={each} in the environment" for each in chosen)
    return Problem("devices", cards, "a process cannot choose its card by number", nearest)


def _too_many_cards(number: int, most: int) -> Problem:
    """The fault of asking for more cards than this job may take."""
    modules = devices.visible_modules()
    limit = "the node has" if modules is None else f"{devices.VISIBLE}={','.join(map(str, modules))} permits"
    return Problem("devices", number, f"{limit} {most}", (most, "auto"))


def preferred_accelerator(parallel_devices: list[torch.device] | None) -> Accelerator | None:
    """Gaudi, for ``Trainer(accelerator="auto")`` where one is present; else ``None``, for Lightning's own choice.

    Lightning uses the strategy's accelerator, and raises an error if the user has named one as well.

    Raises:
        ConfigError: if the user has named Gaudi, and there is none.
    """
    asked = trainer_argument("accelerator")
    if asked == NAME and not devices.hpu_available():
        reason = f"there is no Gaudi here: {devices.why_no_hpu()}; `lightning-megatron doctor` tells more"
        raise ConfigError([Problem("accelerator", asked, reason, ("auto", devices.best_available().type))])
    if parallel_devices or asked != "auto" or devices.best_available() is not devices.HPU:
        return None
    chosen: Accelerator = AcceleratorRegistry.get(NAME)
    return chosen


def register_with_lightning_habana(accelerator: Accelerator | None, strategy: type[Strategy]) -> None:
    """Let a Lightning that still knows lightning-habana (2.5.5 and older) accept its accelerator with this strategy.

    Such a Lightning accepts subclasses of lightning-habana's strategy; this class is registered as one.
    """
    if type(accelerator).__module__.split(".")[0] == "lightning_habana":
        theirs: Any = import_module("lightning_habana.pytorch.strategies")
        theirs.HPUParallelStrategy.register(strategy)


def enable_gpu_migration_on(device: torch.device) -> None:
    """Let modules written for NVIDIA's devices run on Gaudi; elsewhere they run as they are."""
    if device.type == NAME:
        devices.enable_gpu_migration()
    else:
        rank_zero_info(f"gpu_migration=True changes nothing on {device.type}: it is for Gaudi")

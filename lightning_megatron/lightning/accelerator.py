"""Gaudi for Lightning, which has no accelerator of that name any more."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError, Problem

NAME = devices.HPU.type


class HPUAccelerator(Accelerator):
    """Intel Gaudi cards, which ``Trainer(accelerator=...)`` knows as ``NAME``.

    Methods are those of Intel's archived lightning-habana. One process has one card, which it calls number 0 whatever
    its place in the node; which cards a job may take is said by Gaudi's ``HABANA_VISIBLE_MODULES``.
    """

    def setup_device(self, device: torch.device) -> None:
        """Look whether this is a Gaudi.

        Raises:
            ConfigError: if not.
        """
        if device.type != NAME:
            raise ConfigError([Problem("device", str(device), f"{type(self).__name__} drives other devices", (NAME,))])

    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """The allocator's counters under Gaudi's names: ``InUse``, ``MaxInUse``, ``Limit`` ..., in bytes."""
        return dict(
            devices.memory_statistics(torch.device(NAME, device) if isinstance(device, int) else torch.device(device))
        )

    def teardown(self) -> None:
        """Nothing: Gaudi has no cache to empty."""

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """How many cards are asked for.

        Raises:
            ConfigError: for a list of cards, or no number.
        """
        if isinstance(devices, list | tuple):
            reason = "a process cannot choose its card by number"
            cards = ",".join(map(str, devices))
            nearest = (f"{len(devices)}, with HABANA_VISIBLE_MODULES={cards} in the environment",)
            raise ConfigError([Problem("devices", list(devices), reason, nearest)])
        try:
            number = int(devices)
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError([Problem("devices", devices, "must be a number of cards from 1 on, or 'auto'", (1, 8))])
        return number

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """One device a process, all of them with the index that each process uses."""
        return [torch.device(NAME, 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Cards of this node."""
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
        """What ``Trainer(accelerator=...)`` calls it."""
        return NAME

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Make the name known, unless somebody (an old lightning-habana) has it already."""
        if NAME not in accelerator_registry:
            accelerator_registry.register(NAME, cls, description=str(cls.__doc__).splitlines()[0])


def preferred_accelerator(wished_devices: list[torch.device] | None) -> Accelerator | None:
    """The accelerator for a strategy of whose Trainer the user left the choice open; ``None`` for Lightning's choice.

    Lightning chooses among those it knows. It asks the strategy first, but takes an answer for a contradiction where
    the user has named an accelerator himself; so we look whether he has.

    Args:
        wished_devices: that the user gave the strategy.

    Raises:
        ConfigError: if the user has named Gaudi, and there is none.
    """
    asked = given_to_trainer("accelerator")
    if asked == NAME and not devices.hpu_available():
        reason = f"there is no Gaudi here: {devices.why_no_hpu()}; `lightning-megatron doctor` tells more"
        raise ConfigError([Problem("accelerator", asked, reason, ("auto", devices.best_available().type))])
    if wished_devices or asked != "auto" or devices.best_available() is not devices.HPU:
        return None
    chosen: Accelerator = AcceleratorRegistry.get(NAME)
    return chosen


def missed_accelerator(used: torch.device) -> list[Problem]:
    """A Gaudi that nobody chose: Lightning creates strategies given by name too late for them to be asked."""
    by_name = isinstance(given_to_trainer("strategy"), str)
    if not by_name or used.type == NAME or given_to_trainer("accelerator") != "auto" or not devices.hpu_available():
        return []
    reason = f"would take {used.type}, although there is a Gaudi: to a strategy given by its name it must be said"
    return [Problem("accelerator", "auto", reason, (NAME, used.type))]


def be_taken_with(accelerator: Accelerator | None, strategy: type[Strategy]) -> None:
    """Let a Lightning that still knows lightning-habana (2.5.5 and older) take its accelerator with this strategy.

    It asks whether the strategy is one of lightning-habana's; as abstract classes go, it may be told so.
    """
    if type(accelerator).__module__.split(".")[0] == "lightning_habana":
        theirs: Any = import_module("lightning_habana.pytorch.strategies")
        theirs.HPUParallelStrategy.register(strategy)


def migrate_words(device: torch.device) -> None:
    """Let modules written for NVIDIA's devices run on Gaudi; elsewhere they run as they are."""
    if device.type == NAME:
        devices.enable_gpu_migration()
    else:
        rank_zero_info(f"gpu_migration=True changes nothing on {device.type}: it is for Gaudi")


def given_to_trainer(argument: str) -> Any:
    """What the Trainer that is being made was given for an argument; ``None`` if none is being made.

    Read off the stack: Lightning tells no strategy what its Trainer was asked for.
    """
    making = inspect.unwrap(Trainer.__init__).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not making:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(argument)

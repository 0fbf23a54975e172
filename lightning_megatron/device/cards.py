"""Cards of this machine: number, name, and the assignment of one to a process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from lightning_megatron.device.kinds import CPU, HPU, DeviceKind
from lightning_megatron.errors import ConfigError, Problem

VISIBLE = "HABANA_VISIBLE_MODULES"
"""Variable with the numbers of the cards that a job may take, joined by commas."""
_DEFAULT_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12345"}
"""Address that Gaudi's bridge writes into the environment when it is imported, unless there is another one."""
_PAIRS = ("0,1", "2,3", "4,5", "6,7")
_OF_A_CARD = ("ID", "HLS_MODULE_ID")
_SUBSETS = {1: tuple("01234567"), 2: _PAIRS, 4: ("0,1,2,3", "4,5,6,7"), 8: ("0,1,2,3,4,5,6,7",)}
"""Sets of cards, by size, that Gaudi's documents support for one of several jobs on a node."""


def visible_modules() -> tuple[int, ...] | None:
    """Numbers of the cards that this job may take; ``None`` where the environment does not limit them.

    Raises:
        ConfigError: for text that Gaudi's software cannot read.
    """
    text = os.environ.get(VISIBLE)
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        reason = "Gaudi's software reads numbers of cards joined by commas, and no word such as 'all'"
        raise ConfigError(
            [Problem(VISIBLE, text, f"{reason}; unset the variable for all cards", (*_PAIRS, _SUBSETS[8][0]))]
        )
    if len(set(numbers)) < len(numbers):
        raise ConfigError([Problem(VISIBLE, text, "names a card twice", allowed_modules(len(set(numbers))))])
    return tuple(int(number) for number in numbers)


def allowed_modules(count: int) -> tuple[str, ...]:
    """Supported ``HABANA_VISIBLE_MODULES`` for ``count`` cards, or for the next smaller number that has any."""
    return _SUBSETS[max((size for size in _SUBSETS if size <= count), default=1)]


def is_allowed(modules: Sequence[int]) -> bool:
    """True if Gaudi's documents support a job on these cards: one card, a pair, half a node or a node."""
    return ",".join(map(str, sorted(modules))) in _SUBSETS.get(len(modules), ())


def device_count(kind: DeviceKind) -> int:
    """Devices of a kind that a job may take on this node; a CPU counts as one.

    Gaudi's software counts all cards, also those that ``HABANA_VISIBLE_MODULES`` leaves out.

    Raises:
        ConfigError: for a ``HABANA_VISIBLE_MODULES`` that Gaudi's software cannot read.
    """
    if kind.type == CPU.type:
        return 1
    count = int(torch.get_device_module(kind.type).device_count())
    modules = visible_modules() if kind.type == HPU.type else None
    return count if modules is None else min(count, len(modules))


def device_name(device: torch.device) -> str:
    """Marketing name, such as GAUDI2."""
    if device.type == CPU.type:
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of a process of this node; each process sees one Gaudi, with index 0."""
    if kind == CPU.type:
        return torch.device(kind)
    return torch.device(kind, 0 if kind == HPU.type else local_rank)


def take_card(device: torch.device, *, world_size: int, rank: int, local_rank: int) -> None:
    """Assign a card to this process in Gaudi's software. Call it before the first tensor, never in a parent process.

    This writes the ranks and the number of the card into the environment, which children inherit: see
    :func:`drop_card`.
    """
    if device.type == HPU.type and world_size > 1:
        from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

        initialize_distributed_hpu(world_size=world_size, rank=rank, local_rank=local_rank)


def drop_card(device: torch.device) -> None:
    """Release the card's number from the environment, so that the processes started next take one card each.

    The bridge's default address goes too.
    """
    if device.type == HPU.type:
        os.environ.pop("HLS_MODULE_ID", None)
        drop_default_address(device)


def drop_default_address(device: torch.device) -> None:
    """Release the address that Gaudi's bridge has written into the environment.

    With it, all jobs of a node would use one port, and each node of a Slurm job would rendezvous with itself.
    """
    if device.type == HPU.type and all(os.environ.get(name) == value for name, value in _DEFAULT_ADDRESS.items()):
        for name in _DEFAULT_ADDRESS:
            del os.environ[name]


def card_variables() -> dict[str, str]:
    """Variables by which Gaudi's software chooses the card of this process, as far as they are set."""
    names = (*_OF_A_CARD, VISIBLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def describe_cards(cards: Sequence[Mapping[str, str]]) -> str:
    """Describe the card that each rank has asked for, from the :func:`card_variables` of each.

    Without ``HABANA_VISIBLE_MODULES`` the bridge may take another free card, and does not say so.
    """
    shown = (
        f"rank {rank}: {', '.join(own.get(name, 'unset') for name in _OF_A_CARD)}" for rank, own in enumerate(cards)
    )
    limits = sorted({own.get(VISIBLE, "unset") for own in cards})
    return f"{'; '.join(shown)} ({', '.join(_OF_A_CARD)}); {VISIBLE}={' or '.join(limits)}"

"""Settings of the simulated Gaudi, read once from the environment, which child processes inherit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

PROFILE = "LIGHTNING_MEGATRON_HPU_SIM"
DEVICES = "LIGHTNING_MEGATRON_HPU_SIM_DEVICES"
DEVICE_NAME = "LIGHTNING_MEGATRON_HPU_SIM_DEVICE_NAME"
BOX_RANKS = "LIGHTNING_MEGATRON_HPU_SIM_BOX_RANKS"
EXIT_SECONDS = "LIGHTNING_MEGATRON_HPU_SIM_EXIT_SECONDS"
FAULTS = "LIGHTNING_MEGATRON_HPU_SIM_FAULTS"

PROFILES = ("1.19", "1.21", "1.22", "1.24")
_LAZY_BY_DEFAULT = ("1.19", "1.21")


@dataclass(frozen=True)
class Product:
    """Facts about a generation of cards.

    Attributes:
        hbm_bytes: memory of a card.
        largest_e4m3: largest value of its E4M3 format.
        multiplies_two_formats: True if an fp8 product may have operands of different formats.
        expert_chunk_rows: rows that one chunk of the experts' op holds.
    """

    hbm_bytes: int
    largest_e4m3: float
    multiplies_two_formats: bool
    expert_chunk_rows: int


PRODUCTS = {
    "GAUDI2": Product(96 * 2**30, 240.0, False, 256),
    "GAUDI3": Product(128 * 2**30, 448.0, True, 512),
}


@dataclass(frozen=True)
class Settings:
    """Version and size of the simulated machine.

    Attributes:
        profile: version of the Gaudi software that is simulated.
        devices: HPUs of the machine; a process uses one of them.
        device_name: a key of ``PRODUCTS``.
        faults: faults of the installation: ``version``, ``no-local-version``, ``stock`` (in lazy mode) and ``library``
            fail the import of the bridge; ``die:OP``, ``hang:OP`` and ``wrong:OP`` affect an operator, or ``hccl``.
    """

    profile: str
    devices: int
    device_name: str
    faults: frozenset[str] = frozenset()

    @property
    def product(self) -> Product:
        """Facts about the simulated cards."""
        return PRODUCTS[self.device_name]

    @property
    def is_old(self) -> bool:
        """True if this is 1.19: narrow keywords, no mean in HCCL, no gradient through the experts' op."""
        return self.profile == "1.19"

    @property
    def box_ranks(self) -> int | None:
        """Number of ranks in a simulated box; ``None`` for one box that holds them all."""
        asked = os.environ.get(BOX_RANKS)
        return None if asked is None else int(asked)

    @property
    def exit_seconds(self) -> float:
        """Seconds that a process waits at its end for the other members of its groups; no limit on a real Gaudi."""
        return float(os.environ.get(EXIT_SECONDS, "60"))

    @property
    def is_lazy(self) -> bool:
        """True if ops are collected until a step is marked: the default before 1.22."""
        default = "1" if self.profile in _LAZY_BY_DEFAULT else "0"
        return os.environ.get("PT_HPU_LAZY_MODE", default) == "1"


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process.

    Raises:
        ImportError: if the simulation is not enabled, so that nothing uses it as a Gaudi by mistake.
    """
    profile = os.environ.get(PROFILE)
    if profile is None:
        raise ImportError(f"the simulated HPU is off; simulated_gaudi.enable() sets {PROFILE}")
    name = os.environ.get(DEVICE_NAME, "GAUDI2")
    for variable, value, known in ((PROFILE, profile, PROFILES), (DEVICE_NAME, name, tuple(PRODUCTS))):
        if value not in known:
            raise ImportError(f"{variable}={value!r}; known are {', '.join(known)}")
    faults = frozenset(fault for fault in os.environ.get(FAULTS, "").split(",") if fault)
    return Settings(profile, int(os.environ.get(DEVICES, "8")), name, faults)

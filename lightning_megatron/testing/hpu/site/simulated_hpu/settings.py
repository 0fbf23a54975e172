"""Which Gaudi is simulated: read once from the environment, where child processes find it too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

PROFILE = "LIGHTNING_MEGATRON_HPU_SIM"
DEVICES = "LIGHTNING_MEGATRON_HPU_SIM_DEVICES"
PROFILES = ("1.19", "1.21")
HBM_BYTES = 96 * 2**30  # of a GAUDI2


@dataclass(frozen=True)
class Settings:
    """Version and size of the simulated machine.

    Attributes:
        profile: version of the Gaudi software whose behaviour is shown.
        devices: HPUs of the machine; a process uses one of them.
    """

    profile: str
    devices: int

    @property
    def is_old(self) -> bool:
        """True if this is 1.19: narrow keywords, no mean in HCCL, no gradient through the experts' op."""
        return self.profile == "1.19"

    @property
    def is_lazy(self) -> bool:
        """True if ops are collected until a step is marked: by default only in the old version."""
        return os.environ.get("PT_HPU_LAZY_MODE", "1" if self.is_old else "0") == "1"


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process.

    Raises:
        ImportError: if no simulation was asked for, so that nothing takes it for a Gaudi by chance.
    """
    profile = os.environ.get(PROFILE)
    if profile is None:
        raise ImportError(f"the simulated HPU is off; lightning_megatron.testing.hpu.enable() sets {PROFILE}")
    if profile not in PROFILES:
        raise ImportError(f"{PROFILE}={profile!r}; known are {', '.join(PROFILES)}")
    return Settings(profile, int(os.environ.get(DEVICES, "8")))

"""The device's default generator; its state has the format of a host generator's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from simulated_hpu.native_extension import native

from habana_frameworks.torch import hpu

default_generators: tuple[torch.Generator, ...] = (native().default_generator(),)


def _check(device: Any, function: str) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if (hpu.current_device() if index is None else index) != 0:  # without an index this acquires the device
        raise RuntimeError(f"hpu {function} supports only device 0")


def get_rng_state(device: Any = "hpu") -> torch.Tensor:
    """State of the generator, bytes on the host."""
    _check(device, "get_rng_state")
    return default_generators[0].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "hpu") -> None:
    """Set the state of the generator."""
    _check(device, "set_rng_state")
    default_generators[0].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices of the process, which has one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices of the process."""
    states = list(new_states)
    assert len(states) == 1, "a process has one HPU"
    set_rng_state(states[0])


def manual_seed(seed: int) -> torch.Generator:
    """Seed the generator: it then equals a host generator of the same seed."""
    return default_generators[0].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices of the process."""
    manual_seed(seed)


def seed() -> int:
    """Seed the generator with a random number."""
    return default_generators[0].seed()


def seed_all() -> int:
    """Seed the generators of all devices of the process with a random number."""
    return seed()


def initial_seed() -> int:
    """The seed that was set last."""
    return default_generators[0].initial_seed()

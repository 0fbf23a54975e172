"""Random number generators of a device."""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.device.kinds import CPU, CUDA, HPU


def rng_state(device: torch.device) -> torch.Tensor:
    """State of the default generator of ``device``, a byte tensor on the host."""
    if device.type == CPU.type:
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    return module.get_rng_state(device)


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the default generator of ``device``."""
    if device.type == CPU.type:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def seeded_rng_state(seed: int, device: torch.device) -> torch.Tensor:
    """State of a generator of ``device`` after seeding; generators in use do not change."""
    if device.type in (CPU.type, CUDA.type):
        return torch.Generator(device).manual_seed(seed).get_state()
    # Gaudi has no generator objects, and torch.manual_seed would reseed the host as well.
    module: Any = torch.get_device_module(device)
    before = module.get_rng_state(device)
    module.manual_seed(seed)
    state: torch.Tensor = module.get_rng_state(device)
    module.set_rng_state(before, device)
    return state


def initialize_generators(*values: object) -> None:
    """Let ``torch.utils.checkpoint`` preserve the random state of the devices of some tensors.

    It does so for initialized devices only, and a Gaudi may be in use without counting as initialized.

    Args:
        *values: inputs of a function that will be recomputed; others than tensors are ignored.
    """
    for kind in {value.device.type for value in values if isinstance(value, torch.Tensor)} & {HPU.type}:
        torch.get_device_module(kind).init()

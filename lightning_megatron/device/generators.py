"""Random number generators of a device."""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.device.kinds import CPU, HPU


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


def seed_generator(seed: int, device: torch.device) -> None:
    """Seed the default generator of ``device`` alone: ``torch.manual_seed`` would seed those of all devices."""
    if device.type == CPU.type:
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def initialize_generators(*devices: torch.device) -> None:
    """Let ``torch.utils.checkpoint`` preserve the random state of some devices.

    It does so for initialized devices only, and a Gaudi may be in use without counting as initialized.
    """
    for kind in {device.type for device in devices} & {HPU.type}:
        torch.get_device_module(kind).init()

"""Checks of the accelerator that Lightning has chosen."""

from __future__ import annotations

import torch

from lightning_megatron import device as devices
from lightning_megatron.errors import Problem
from lightning_megatron.lightning.compat._private import trainer_argument
from lightning_megatron.lightning.compat.accelerator import NAME


def accelerator_problems(used: torch.device) -> list[Problem]:
    """Faults of the device that Lightning has chosen."""
    if devices.shares_weights(used):
        reason = (
            "in lazy mode Gaudi's software then replaces parameters, and the forward would not see them change: set it"
            " to 0 before habana_frameworks is imported (lightning_megatron does so where it is the first to import it)"
        )
        return [Problem("PT_HPU_WEIGHT_SHARING", devices.weight_sharing(), reason, (0,))]
    return _idle_problems(used)


def _idle_problems(used: torch.device) -> list[Problem]:
    """The fault of a Gaudi left idle: Lightning creates strategies given by name after it has chosen a device."""
    by_name = isinstance(trainer_argument("strategy"), str)
    if not by_name or used.type == NAME or trainer_argument("accelerator") != "auto" or not devices.hpu_available():
        return []
    reason = f"picks {used.type} although a Gaudi is present: name it, since a strategy given by name cannot choose it"
    return [Problem("accelerator", "auto", reason, (NAME, used.type))]

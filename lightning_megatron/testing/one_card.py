"""Ranks that share one CUDA card, each as a node of its own: tests with real NCCL on a machine with a single GPU.

A pytest plugin too: ``pytest -p lightning_megatron.testing.one_card --one-card`` lets the Trainers of the tests train
on CUDA. NCCL refuses two ranks of one host on one card; ranks with different ``NCCL_HOSTID`` count as different hosts,
and talk through sockets (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

ENABLED = "LIGHTNING_MEGATRON_ONE_CARD"


def enable() -> None:
    """Train on the card from now on, in this process and in all that it starts.

    Raises:
        RuntimeError: if torch sees no card.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA card here")
    os.environ[ENABLED] = "1"


def enabled() -> bool:
    """True if tests train on CUDA."""
    return ENABLED in os.environ


def become_a_node(rank: int) -> None:
    """Make NCCL treat this process as a separate host; call it before the first communicator is created."""
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--one-card``."""
    parser.getgroup("CUDA").addoption("--one-card", action="store_true", help="Trainers of the tests train on CUDA")


def pytest_configure(config: pytest.Config) -> None:
    """Enable the card before any test module is imported."""
    if config.getoption("--one-card"):
        enable()

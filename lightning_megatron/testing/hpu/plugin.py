"""A pytest plugin: ``pytest -p lightning_megatron.testing.hpu.plugin --hpu-sim 1.21`` runs on simulated HPUs."""

from __future__ import annotations

import pytest

from lightning_megatron.testing import hpu


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--hpu-sim PROFILE`` and ``--hpu-sim-devices N``."""
    group = parser.getgroup("simulated HPU")
    group.addoption("--hpu-sim", metavar="PROFILE", choices=["1.19", "1.21"], help="version of the Gaudi software")
    group.addoption("--hpu-sim-devices", metavar="N", type=int, default=8, help="HPUs of the machine (default 8)")


def pytest_configure(config: pytest.Config) -> None:
    """Enable the simulation before any test module is imported."""
    profile = config.getoption("--hpu-sim")
    if profile is not None:
        hpu.enable(profile, config.getoption("--hpu-sim-devices"))

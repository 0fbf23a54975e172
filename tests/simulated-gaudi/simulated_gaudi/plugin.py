"""A pytest plugin: ``pytest -p simulated_gaudi.plugin --hpu-sim 1.24`` runs on simulated HPUs."""

from __future__ import annotations

import pytest

import simulated_gaudi as hpu


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--hpu-sim PROFILE``, ``--hpu-sim-device NAME`` and ``--hpu-sim-devices N``."""
    group = parser.getgroup("simulated HPU")
    versions = "version of the Gaudi software: " + ", ".join(hpu.PROFILES)
    group.addoption("--hpu-sim", metavar="PROFILE", choices=hpu.PROFILES, help=versions)
    names = "product: " + ", ".join(hpu.DEVICE_NAMES)
    group.addoption("--hpu-sim-device", metavar="NAME", choices=hpu.DEVICE_NAMES, default="GAUDI2", help=names)
    group.addoption("--hpu-sim-devices", metavar="N", type=int, default=8, help="HPUs of the machine (default 8)")


def pytest_configure(config: pytest.Config) -> None:
    """Enable the simulation before any test module is imported."""
    profile = config.getoption("--hpu-sim")
    if profile is not None:
        hpu.enable(profile, config.getoption("--hpu-sim-devices"), config.getoption("--hpu-sim-device"))

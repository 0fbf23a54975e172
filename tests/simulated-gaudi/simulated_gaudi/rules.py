"""Pytest plugin of the processes that try rules on a real card; it reports each outcome to :mod:`real_card`."""

from __future__ import annotations

import importlib
import json
import os
import platform
from typing import Any

import pytest
import torch

import simulated_gaudi as hpu
from lightning_megatron import device
from lightning_megatron.machine.gaudi import BRIDGE, installed
from simulated_gaudi.report import DIFFERS, FAILED, HOLDS, REFUSED_OTHERWISE, SKIPPED

FOLDER = "rules"
SIMULATION = "simulation"
"""Mark of tests that need the simulation's own switches."""
PACKAGES = ("lightning-megatron", "lightning", "torch", BRIDGE)
PREFIXES = ("PT_", "HABANA_", "HCCL_", "HLS_", "GC_", "HL_", "TORCH_")
LONGEST = 4000
"""Characters of a message that are kept."""


class Recorder:
    """Plugin that reports through a pipe.

    Args:
        pipe: file descriptor that :mod:`real_card` reads.
        several: True if this process tries the rules for several processes, and must hold no card itself.
        done: names of rules that have been tried.

    Raises:
        pytest.UsageError: if there is no real card.
    """

    def __init__(self, pipe: int, several: bool, done: list[str]) -> None:
        if hpu.enabled():
            raise pytest.UsageError("--hpu-real is for real cards, and this session simulates them: drop --hpu-sim")
        if not device.hpu_available():
            raise pytest.UsageError(f"--hpu-real needs a Gaudi: {device.why_no_hpu()}")
        os.set_inheritable(pipe, False)
        self._pipe, self._several, self._done = pipe, several, set(done)
        self._reports: list[pytest.TestReport] = []

    def pytest_sessionstart(self) -> None:
        """Report the facts of the machine."""
        self._tell(facts=facts(holds_a_card=not self._several))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Report the rules of this process, and keep those that have not been tried."""
        rules = [item for item in items if is_rule(item) and needs_several(item) == self._several]
        self._tell(rules={item.nodeid: in_words(item) for item in rules})
        chosen = [item for item in rules if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report that a rule begins."""
        self._reports = []
        self._tell(begin=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report the outcome of a rule after its last phase."""
        self._reports.append(report)
        if report.when == "teardown":
            self._tell(end=report.nodeid, **outcome(self._reports))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Report that all rules were tried, failed ones included."""
        done = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if exitstatus in done:
            self._tell(complete=True)

    def _tell(self, **said: Any) -> None:
        os.write(self._pipe, json.dumps(said, default=str).encode() + b"\n")


def is_rule(item: pytest.Item) -> bool:
    """True if a test is a rule that must hold on a real card too."""
    return FOLDER in item.path.parts and item.get_closest_marker(SIMULATION) is None


def needs_several(item: pytest.Item) -> bool:
    """True if a test runs a function on several ranks."""
    return "ranks" in getattr(item, "fixturenames", ())


def in_words(item: pytest.Item) -> str:
    """The name of a test as a sentence, with its parameters."""
    name, _, parameters = item.name.partition("[")
    return name.removeprefix("test_").replace("_", " ") + (f" [{parameters}" if parameters else "")


def outcome(reports: list[pytest.TestReport]) -> dict[str, Any]:
    """Fields of a rule's entry in the report, from pytest's reports of its phases."""
    properties = dict(reports[-1].user_properties)
    found: dict[str, Any] = {"status": HOLDS, "seconds": round(sum(report.duration for report in reports), 3)}
    found |= {name: properties[name] for name in ("expected", "measured") if name in properties}
    for report in reports:
        if report.failed:
            message = _message(report)
            wrong = report.when == "call" and message.startswith(("AssertionError", "assert", "Failed"))
            return found | {"status": DIFFERS if wrong else FAILED, "found": message}
        if report.skipped:
            expected_failure = hasattr(report, "wasxfail")
            status = REFUSED_OTHERWISE if expected_failure else SKIPPED
            return found | {"status": status, "found": report.wasxfail if expected_failure else _reason(report)}
    return found


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr)[:LONGEST]


def _reason(report: pytest.TestReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


def facts(holds_a_card: bool) -> dict[str, Any]:
    """Versions, cards and switches, for the head of the report.

    Args:
        holds_a_card: True if this process may take a card, which the product's name needs.

    Raises:
        pytest.UsageError: if the card cannot be taken.
    """
    module: Any = torch.get_device_module("hpu")
    found: dict[str, Any] = {
        "versions": {name: installed(name) for name in PACKAGES} | {"torch": torch.__version__},
        "python": platform.python_version(),
        "system": platform.platform(),
        "device_count": int(module.device_count()),
        "lazy": bool(importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy()),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }
    if holds_a_card:
        try:
            found["product"] = str(module.get_device_name())
            torch.ones(4, device="hpu").sum().item()
        except Exception as error:
            raise pytest.UsageError(f"--hpu-real: the card cannot be used: {type(error).__name__}: {error}") from error
        found["module_id"] = {name: os.environ.get(name) for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES")}
    return found

"""Findings about the installed software and the machine, for a planned job."""

from __future__ import annotations

import os
from platform import python_version

import torch

from lightning_megatron import device as devices
from lightning_megatron.errors import ConfigError
from lightning_megatron.machine import container, gaudi, host, network
from lightning_megatron.machine.finding import Finding

_ARCHIVED_UNTIL = (2, 5, 5)
"""The newest Lightning on which Intel's archived plugin can be imported."""


def findings(ranks: int) -> list[Finding]:
    """All findings, for a job of ``ranks`` ranks."""
    has_bridge = gaudi.installed(gaudi.BRIDGE) is not None
    rest = {name: value for name, value in os.environ.items() if name != devices.VISIBLE}
    return [
        Finding("Python", python_version()),
        Finding("lightning-megatron", gaudi.installed("lightning-megatron") or "not installed"),
        _torch(),
        *_lightning(),
        gaudi.software(torch.__version__),
        *bridge_import(),
        *gaudi.driver(),
        *gaudi.mode(),
        *(container.container() if has_bridge else ()),
        *visible_modules_setting(),
        _taken(),
        *gaudi.environment(rest),
        host.shared_memory(),
        host.open_files(ranks),
        *([network.gloo_interface()[1]] if ranks > 1 else ()),
    ]


def bridge_import() -> list[Finding]:
    """The outcome of the bridge's import; empty where there is no bridge."""
    reason = devices.why_no_hpu()
    if not gaudi.has_bridge():
        return []
    return [Finding("Gaudi bridge", "imported, and sees cards" if reason is None else "not usable", reason or "")]


def visible_modules_setting() -> list[Finding]:
    """The cards that the environment permits; empty if it does not limit them."""
    try:
        modules = devices.visible_modules()
    except ConfigError as error:
        faults = "; ".join(f"{each.reason}; valid: {' or '.join(map(str, each.nearest))}" for each in error.problems)
        return [Finding(devices.VISIBLE, os.environ[devices.VISIBLE], faults)]
    if modules is None:
        return []
    allowed = " or ".join(devices.allowed_modules(len(modules)))
    fault = "" if devices.is_allowed(modules) else f"Gaudi's documents support other sets for several jobs: {allowed}"
    return [Finding(devices.VISIBLE, ",".join(map(str, modules)), fault, harmful=False)]


def _torch() -> Finding:
    oldest = ".".join(map(str, gaudi.OLDEST_TORCH))
    here = tuple(int(part) for part in gaudi.minor(torch.__version__).split("."))
    return Finding("torch", torch.__version__, "" if here >= gaudi.OLDEST_TORCH else f"{oldest} or newer is needed")


def _lightning() -> list[Finding]:
    lightning, archived = gaudi.installed("lightning"), gaudi.installed("lightning-habana")
    if lightning is None:
        return [Finding("Lightning", "not installed", "install lightning >= 2.5")]
    found = [Finding("Lightning", lightning)]
    if archived is not None:
        here = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in lightning.split(".")[:3])
        newest = ".".join(map(str, _ARCHIVED_UNTIL))
        fault = f"cannot be imported on a Lightning newer than {newest}; nothing here needs it"
        found.append(Finding("lightning-habana", archived, fault if here > _ARCHIVED_UNTIL else "", harmful=False))
    return found


def _taken() -> Finding:
    kind = devices.best_available()
    try:
        count = devices.device_count(kind)
    except ConfigError:  # reported by visible_modules_setting
        return Finding("a Trainer takes", "nothing", f"{devices.VISIBLE} cannot be read")
    return Finding("a Trainer takes", f"{kind.type}, {count} {'device' if count == 1 else 'devices'} here")

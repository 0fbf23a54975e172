"""Collection of these tests only in sessions that simulate HPUs, which ``test_sessions.py`` starts."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.testing import hpu


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A hook, not a list: this file may be read before the plugin has switched the simulation on."""
    starts_sessions = collection_path.name == "test_sessions.py"
    return True if collection_path.suffix == ".py" and starts_sessions == hpu.enabled() else None

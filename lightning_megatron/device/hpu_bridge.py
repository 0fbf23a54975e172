"""Names from Intel's bridge to the Gaudi (``habana_frameworks``), which is not imported before the first use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from lightning_megatron.device.kinds import prepare_bridge

_PACKAGE = "habana_frameworks"


def missing(module: str, name: str) -> str | None:
    """The reason why ``habana_frameworks.torch.<module>`` has no ``name``; ``None`` if it has."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"{_PACKAGE} is not installed"
    prepare_bridge()
    try:
        found = import_module(f"{_PACKAGE}.torch.{module}")
    except Exception as error:  # a bridge that does not fit this torch fails with errors of many classes
        return f"{_PACKAGE} cannot be imported: {type(error).__name__}: {error}"
    return None if hasattr(found, name) else f"{_PACKAGE}.torch.{module} has no {name}"


def requires(module: str, name: str) -> Callable[[], str | None]:
    """A function without arguments that calls :func:`missing` with these."""
    return partial(missing, module, name)


def bridge(module: str, name: str) -> Any:
    """``habana_frameworks.torch.<module>.<name>``."""
    return getattr(import_module(f"{_PACKAGE}.torch.{module}"), name)

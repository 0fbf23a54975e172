"""Public names of a package that are imported at their first use (PEP 562)."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_megatron.deprecation import DEPRECATED, Deprecation


def exports_of(
    package: str, deprecated: Mapping[str, Deprecation] = DEPRECATED
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, for the names that its ``if TYPE_CHECKING:`` imports.

    Args:
        package: ``__name__`` of the package.
        deprecated: deprecated names of all packages.
    """
    spec: Any = find_spec(package)
    module, module_of = "", {}
    for step in dis.get_instructions(spec.loader.get_code(package)):  # byte code exists without the source, too
        if step.opname == "IMPORT_NAME":
            module = step.argval
        elif step.opname == "IMPORT_FROM":
            module_of[step.argval] = module

    def get_attribute(name: str) -> Any:
        """Import the module of a public name, once."""
        if f"{package}.{name}" in deprecated:
            return deprecated[f"{package}.{name}"].value(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get_attribute, names

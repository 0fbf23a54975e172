"""Public names of a package that are imported at their first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from lightning_megatron.deprecation import DEPRECATED, Deprecation


def exports_of(
    package: str, modules: Mapping[str, Sequence[str]], deprecated: Mapping[str, Deprecation] = DEPRECATED
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: ``__name__`` of the package.
        modules: public names by the module below the package that defines them.
        deprecated: names that will go, of all packages.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}

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

"""Public names of a package that are imported at their first use (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import get_data
from typing import Any

from lightning_megatron.deprecation import DEPRECATED, Deprecation


def exports_of(
    package: str, deprecated: Mapping[str, Deprecation] = DEPRECATED
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``, for the names that it imports under ``if TYPE_CHECKING:``.

    Args:
        package: ``__name__`` of the package.
        deprecated: names that will go, of all packages.
    """
    body = ast.parse(get_data(package, "__init__.py") or b"").body
    typed = (block for block in body if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
    imports = [line for block in typed for line in block.body if isinstance(line, ast.ImportFrom)]
    module_of = {name.name: line.module or "" for line in imports for name in line.names}

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

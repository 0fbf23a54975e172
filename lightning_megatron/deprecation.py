"""Deprecated public names: they return their replacement with a ``FutureWarning``, until a version removes them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Deprecation:
    """Deprecation of a public name.

    Args:
        replacement: full name of the replacement, such as ``"lightning_megatron.Throughput"``.
        since: first version that warns.
        until: version that no longer has the name, a minor release after ``since`` or later.
    """

    replacement: str
    since: str
    until: str

    def value(self, name: str) -> Any:
        """Return the replacement, and warn at the line that called the package's ``__getattr__``.

        Args:
            name: full name of the deprecated attribute.
        """
        text = f"{name} is deprecated since {self.since} and will be removed in {self.until}: use {self.replacement}"
        warnings.warn(text, FutureWarning, stacklevel=3)
        module, _, attribute = self.replacement.rpartition(".")
        return getattr(import_module(module), attribute)


DEPRECATED: Mapping[str, Deprecation] = MappingProxyType({})
"""Deprecations by full name; CONTRIBUTING.md has the rule, docs/names.yaml all names that were ever public."""

"""Public names that will go: they lead to what replaces them, with a warning, until the version that drops them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Deprecation:
    """The end of a public name.

    Args:
        replacement: full name of what replaces it, such as ``"lightning_megatron.Throughput"``.
        since: version that warns first.
        until: version that no longer has the name, a minor release after ``since`` or later.
    """

    replacement: str
    since: str
    until: str

    def value(self, name: str) -> Any:
        """The replacement, with a warning at the caller of a package's ``__getattr__``.

        Args:
            name: full name of what was asked for.
        """
        text = f"{name} is deprecated since {self.since} and will be removed in {self.until}: use {self.replacement}"
        warnings.warn(text, FutureWarning, stacklevel=3)
        module, _, attribute = self.replacement.rpartition(".")
        return getattr(import_module(module), attribute)


DEPRECATED: Mapping[str, Deprecation] = MappingProxyType({})
"""By full names; CONTRIBUTING.md has the rule, and docs/names.yaml what was public."""

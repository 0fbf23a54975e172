"""Versions of libraries that a rank has loaded, and hashes of source files and classes."""

from __future__ import annotations

import hashlib
import inspect
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_megatron.lightning.comparison.values import Facts, digest_of

_LIBRARIES = ("torch", "lightning", "numpy", "lightning-megatron")
_OF_LIBRARIES = ("builtins", "torch.", "lightning.", "lightning_megatron.")


def code_facts(*instances: object) -> Facts:
    """Versions of libraries, and hashes of the classes of a user's objects.

    Args:
        *instances: module and data module; classes of libraries are compared by versions.
    """
    facts: Facts = {f"code.{name}": _version(name) for name in _LIBRARIES}
    facts["code.python"] = platform.python_version()
    facts["code.lightning_megatron"] = package_digest()
    for instance in instances:
        for kind in type(instance).__mro__:
            if not f"{kind.__module__}.".startswith(_OF_LIBRARIES):
                facts[f"code.{kind.__qualname__}"] = class_digest(kind)
    return facts


def class_digest(kind: type) -> str:
    """Hash of a class's source; ``"no source"`` for a class without a file (of a notebook, or made at run time)."""
    try:
        return digest_of(inspect.getsource(kind))
    except (OSError, TypeError):
        return "no source"


@cache
def package_digest() -> str:
    """Hash of this package's files, since two checkouts may have the same version."""
    root = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

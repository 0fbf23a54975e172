"""Versions of libraries and hashes of classes that a rank has loaded."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType
from typing import Any

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
    """Hash of the methods of a class as they were loaded, since its file may have changed meanwhile."""
    return digest_of("\n".join(text for name, value in sorted(vars(kind).items()) for text in _methods(name, value)))


def _methods(name: str, value: Any) -> Iterator[str]:
    functions = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    for function in functions:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield f"{name}: {_code_text(code)}"


def _code_text(code: CodeType) -> str:
    return f"{code.co_code.hex()} {code.co_names} {[_constant_text(constant) for constant in code.co_consts]}"


def _constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _code_text(constant)
    if isinstance(constant, frozenset):  # its order differs between processes
        return str(sorted(map(repr, constant)))
    return repr(constant)


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

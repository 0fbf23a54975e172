"""Registration of our strategy and accelerator by name, as soon as Lightning is imported.

Lightning has no entry point for strategies, and importing it takes seconds. So before it is imported, a finder in
``sys.meta_path`` waits for ``lightning.pytorch``, and is removed after that import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AWAITED = "lightning.pytorch"


def register_with_lightning() -> None:
    """Register now if Lightning is imported, else right after its import."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    import lightning_megatron.lightning.registered  # noqa: F401


class _Waiting(MetaPathFinder):
    """Finder of one module, by the other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other finders' spec, with a loader that registers after loading."""
        if name != _AWAITED:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    """Loader that calls another loader, and registers.

    Args:
        loader: the other loader, which the module keeps as its own.
        finder: finder that is removed after loading.
    """

    def __init__(self, loader: Loader, finder: MetaPathFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The empty module."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, and register."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)  # if this fails, the finder stays for another import
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _register()

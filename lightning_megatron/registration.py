"""Registration of our strategy and accelerator by name, as soon as Lightning is imported, and of classes for its CLI.

Lightning has no entry point for strategies, and importing it takes seconds. So before it is imported, a finder in
``sys.meta_path`` waits for ``lightning.pytorch``, and is removed after that import; another waits for its CLI.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AWAITED = {
    "lightning.pytorch": "lightning_megatron.lightning.registered",
    "lightning.pytorch.cli": "lightning_megatron.lightning.classes_for_cli",
}
"""Modules of ours by the module of Lightning whose import they follow."""


def register_with_lightning() -> None:
    """Register now with modules that are imported already, and with the others right after their import."""
    waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _Waiting)}
    for awaited, follows in _AWAITED.items():
        if awaited in sys.modules:
            import_module(follows)
        elif awaited not in waiting:
            sys.meta_path.insert(0, _Waiting(awaited))


class _Waiting(MetaPathFinder):
    """Finder of one module, which asks the other finders and adds a registration after the import.

    Args:
        awaited: name of the module.

    Attributes:
        awaited: name of the module.
    """

    def __init__(self, awaited: str) -> None:
        self.awaited = awaited

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The other finders' spec, with a loader that registers after loading."""
        if name != self.awaited:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self)
        return spec


class _ThenRegister(Loader):
    """Loader that calls another loader, and then registers our classes.

    Args:
        loader: the other loader, which the module keeps as its own.
        finder: finder that is removed after loading.
    """

    def __init__(self, loader: Loader, finder: _Waiting) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the empty module with the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, and then register our classes."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)  # if this fails, the finder stays for another import
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        import_module(_AWAITED[self._finder.awaited])

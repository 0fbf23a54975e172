"""The extension, compiled at its first use on a machine and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_hpu_native"
HERE = Path(__file__).parent


class CompileError(RuntimeError):
    """The extension could not be compiled."""


def cache_directory() -> Path:
    """Folder of the extension for this source, torch and Python; a temporary one if there is no home."""
    home = Path.home()
    own = home / ".cache" if os.access(home, os.W_OK) else Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or own)
    digest = hashlib.sha256()
    for path in sorted((HERE / "native").iterdir()):
        digest.update(path.read_bytes())
    name = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:12]}"
    return cache / "lightning-megatron" / "simulated-hpu" / name


def build() -> Path:
    """Compile the extension if needed, and return its file.

    Of several processes at once, one compiles and the others wait.

    Raises:
        CompileError: with the compiler's output.
    """
    directory = cache_directory()
    library = directory / f"{NAME}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(directory, lock.fileno())
    return library


def _compile(directory: Path, lock: int) -> None:
    scratch = directory / "build"
    scratch.mkdir(exist_ok=True)
    (scratch / "lock").unlink(missing_ok=True)  # torch's own lock, left by a killed build; we hold another one
    # ninja may be a package of this environment, which need not be activated.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / "compile.py"), str(scratch)],
        env=environment,
        pass_fds=[lock],  # a compiler that outlives this process keeps the lock
        capture_output=True,
        text=True,
        check=False,
    )
    built = scratch / f"{NAME}.so"
    if done.returncode or not built.exists():
        raise CompileError(
            "the simulated HPU is a C++ extension, compiled at its first use, and that failed. It needs a C++ compiler "
            f"with C++17 (C++20 for newer torch) and ninja.\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
    os.replace(built, directory / f"{NAME}.so")


@lru_cache(maxsize=1)
def native() -> ModuleType:
    """The loaded extension.

    Raises:
        CompileError: if it cannot be compiled.
        RuntimeError: if torch has already looked for an HPU, and found none.
    """
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.installed():
        raise RuntimeError(
            "torch has decided that there is no HPU before the simulation was loaded, and does so once: enable it "
            "before the first tensor is made"
        )
    return module

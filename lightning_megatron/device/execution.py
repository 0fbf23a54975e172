"""Execution of a device's work: modes, marked steps, synchronization, compilation, worker processes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.device.kinds import CPU, CUDA, HPU, WEIGHT_SHARING, prepare_bridge


def is_lazy(device: torch.device) -> bool:
    """True if ops on ``device`` are collected until a step is marked (Gaudi's legacy lazy mode)."""
    if device.type != HPU.type:
        return False
    asked = os.environ.get("PT_HPU_LAZY_MODE")
    if asked is not None:
        return asked == "1"
    if importlib.util.find_spec("habana_frameworks") is None:
        return False
    prepare_bridge()
    # The default depends on the release.
    internal: Any = importlib.import_module("habana_frameworks.torch.utils.internal")
    return bool(internal.is_lazy())


def weight_sharing() -> str:
    """Setting of weight sharing that Gaudi's bridge sees."""
    return os.environ.get(WEIGHT_SHARING, "1")


def shares_weights(device: torch.device) -> bool:
    """True if Gaudi's bridge replaces the parameters of modules that move to ``device``: see :func:`prepare_bridge`."""
    return is_lazy(device) and weight_sharing() != "0"


def mark_step(device: torch.device) -> None:
    """Run the ops that Gaudi's lazy mode has collected; no effect on other devices."""
    if is_lazy(device):
        import habana_frameworks.torch.core as core

        core.mark_step()


def synchronize(device: torch.device) -> None:
    """Wait for all work submitted to ``device``."""
    if device.type == CUDA.type:
        torch.cuda.synchronize(device)
    elif device.type == HPU.type:
        import habana_frameworks.torch.hpu as hpu

        hpu.synchronize()


def timing_event(device: torch.device) -> Any | None:
    """A timing event for a stream of ``device``; ``None`` for a CPU."""
    if device.type == CPU.type:
        return None
    return torch.get_device_module(device).Event(enable_timing=True)


def compile_backend(device: torch.device) -> str:
    """``backend`` of ``torch.compile``."""
    return "hpu_backend" if device.type == HPU.type else "inductor"


def compiler_lacks(device: torch.device, backend: str) -> str | None:
    """Tool that a backend of ``torch.compile`` does not find on this machine; ``None`` if none is known to be missing.

    Args:
        device: device of the job.
        backend: the backend; only the requirements of ``"inductor"`` are known.
    """
    if backend != "inductor" or sys.platform == "win32":
        return None
    if device.type == CUDA.type:
        if importlib.util.find_spec("triton") is None:
            return "the package triton, which comes with torch's builds for CUDA"
        # Triton builds the launchers of its kernels in the first step, in C.
        language, variable, package, compilers = "C", "CC", "gcc", ["gcc", "clang"]
    elif device.type == CPU.type and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        language, variable, package = "C++", "CXX", "g++"
        compilers = ["clang++" if sys.platform == "darwin" else "g++"]
    else:
        return None
    named = os.environ.get(variable)
    compilers = compilers if named is None else [named]
    if not any(map(shutil.which, compilers)):
        there = f"there is no {' and no '.join(compilers)}; install it (Debian: {package})"
        return f"a {language} compiler: {there}, or name another one in {variable}"
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return f"Python's headers: there is no {headers}/Python.h (Debian: python3-dev)"
    return None


def compiles_fixed_shapes(device: torch.device) -> bool:
    """True if a graph of ``torch.compile`` should be made for fixed shapes.

    On Gaudi every new shape is compiled for minutes, and shapes that vary within a graph run slower.
    """
    return device.type == HPU.type


def recomputes_in_graphs(device: torch.device) -> bool:
    """True if the backward of a compiled graph is known to respect activation recomputation.

    torch's own partitioner into forward and backward does; for Gaudi's backend this is not documented.
    """
    return device.type != HPU.type


def as_result(x: Tensor) -> Tensor:
    """Make ``x`` the result of an autograd function's ``forward``: under ``torch.compile`` as a view.

    ``torch.compile`` of torch 2.11 loses the gradient of a function whose result is the same tensor that its last
    operation received, as with ``x.mul_(y)`` or an ``x.to(dtype)`` that changes nothing
    (https://github.com/pytorch/pytorch/issues/180642). A view is a new tensor.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


def compiles_ends(device: torch.device) -> bool:
    """True if ``compile=True`` compiles embedding, final norm, output layer and loss too, not only the blocks.

    On Gaudi each of their operations would otherwise be a pass over memory, even over logits in fp32.
    """
    return device.type == HPU.type


def compiles_softmax(device: torch.device) -> bool:
    """True if ``compile=True`` compiles the passes over logits by themselves, without the head around them.

    On CUDA they are three kernels then, in place of eight that read or write logits in fp32
    (``benchmarks/device_step_h200_202611.md``). The products beside them add their gradients in place only outside of
    graphs. On a CPU each pass finds its rows in the caches.
    """
    return device.type == CUDA.type


_RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
_RECIPE_MEGABYTES = 8192


def keep_recipes(device: torch.device, root: str) -> str | None:
    """Let Gaudi's compiler cache its recipes on disk, so that a restarted job does not compile them again.

    The processes of a node share a folder. Each node has its own, since the root may be on storage that nodes share.
    A ``PT_HPU_RECIPE_CACHE_CONFIG`` that the user has set stays.

    Args:
        device: device of the job; only Gaudi's software compiles such recipes.
        root: folder of the job.

    Returns:
        The folder, or ``None`` if the user has set the variable, or the root is a URL or contains a comma.
    """
    if device.type != HPU.type or _RECIPES in os.environ or "://" in root or "," in root:
        return None
    folder = os.path.join(os.path.abspath(root), "recipes", socket.gethostname())
    os.environ[_RECIPES] = f"{folder},false,{_RECIPE_MEGABYTES}"  # folder, emptied at start, largest size
    return folder


def enable_gpu_migration() -> None:
    """Run users' code that names "cuda" on Gaudi, by Intel's toolkit. This package does not need it."""
    prepare_bridge()
    importlib.import_module("habana_frameworks.torch.gpu_migration")


def worker_start_method(device: torch.device) -> str | None:
    """Start method of DataLoader workers, ``None`` for torch's default: Gaudi's software does not survive a fork."""
    return "spawn" if device.type == HPU.type else None

"""Leftovers of a test: process groups, threads, variables of the environment, files and processes."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

# What libraries set when they are imported, and keep.
OF_LIBRARIES = {"PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA_MODULE_LOADING", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
OF_LIBRARIES |= {"PT_HPU_WEIGHT_SHARING", "CUDA_DEVICE_ORDER", "TRITON_PTXAS_PATH"}
OF_LIBRARIES |= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TOKENIZERS_PARALLELISM", "PYTEST_CURRENT_TEST"}
# What Lightning and torch set for a job, and leave: the guard puts it back after each test.
OF_A_JOB = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "GLOBAL_RANK", "GROUP_RANK"}
OF_A_JOB |= {"PL_GLOBAL_SEED", "PL_SEED_WORKERS", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "HLS_MODULE_ID", "ID"}
OF_A_JOB |= {"TORCHELASTIC_USE_AGENT_STORE", "PT_HPU_RECIPE_CACHE_CONFIG"}
# Threads, files and processes that a library makes and keeps, by the beginning of the name.
KEPT_THREADS = ("tqdm", "TMonitor", "SubprocPool", "Thread-1 (_read_thread)", "execnet", "pytest_timeout")
KEPT_THREADS += ("Dummy-",)  # torch's own, in which the backward of a device runs Python
KEPT_THREADS += ("InductorSubproc", "subproc_worker_timer")  # of the compiler for CUDA
KEPT_FILES = ("pymp-", "torchelastic_", "torchinductor_")
KEPT_FILES += ("lm-workers-", ".actions")  # of the session's own pool, made anew after a failure; records of its runs
KEPT_FILES += ("ompi.",)  # of MPI, which Lightning starts to see if it runs below it, where mpi4py is installed
KEPT_PROCESSES = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "compile_worker", "orted")


def look(pool: Iterable[int] = ()) -> dict[str, set[str]]:
    """Everything that exists now, by kind.

    Args:
        pool: ids of processes that serve the whole session.
    """
    return {
        "process group": {"the default one"} if dist.is_available() and dist.is_initialized() else set(),
        "thread": {thread.name for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS)},
        "variable": {f"{name}={value}" for name, value in os.environ.items() if name not in OF_A_JOB | OF_LIBRARIES},
        "file": {path.name for path in Path(tempfile.gettempdir()).iterdir() if not path.name.startswith(KEPT_FILES)},
        "process": processes(set(map(str, pool))),
    }


def left(before: dict[str, set[str]], pool: Iterable[int] = (), patience: float = 60.0) -> list[str]:
    """Everything that exists now and did not before; threads, processes and files have some time to go.

    Args:
        before: result of :func:`look`.
        pool: ids of processes that serve the whole session.
        patience: seconds.
    """
    deadline = time.monotonic() + patience
    pool = tuple(pool)
    while True:
        now = look(pool)
        found = [f"{kind} {name}" for kind in now for name in sorted(now[kind] - before[kind])]
        ending = any(text.startswith(("thread", "process ", "file")) for text in found)
        if not ending or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def processes(pool: set[str]) -> set[str]:
    """Children of this process, and what the fork server has forked for others than the pool; only on Linux."""
    found = set()
    for child in _children(str(os.getpid())):
        command = _command(child)
        if "multiprocessing.forkserver" in command:
            forked = set(_children(child)) - pool
            found |= {f"{process} {text[:80]}" for process in forked if (text := _command(process))}
        elif command and not any(kept in command for kept in KEPT_PROCESSES):
            found.add(f"{child} {command[:80]}")
    return found


def _children(process: str) -> list[str]:
    found: list[str] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            found += Path(f"/proc/{process}/task/{thread}/children").read_text().split()
    except OSError:  # it has ended, or this is not Linux
        pass
    return found


def _command(process: str) -> str:
    """Words of a process, or nothing if it has ended and only its parent has not heard."""
    try:
        name, _, state = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        words = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
    return "" if state.split()[0] == "Z" else words or name.partition("(")[2]

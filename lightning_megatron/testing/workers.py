"""Pool of gloo processes for a whole test session.

Importing torch and Lightning takes seconds, so a spawn per test would cost more than the test. Here a fork server
imports them once, workers are forked from it once, and each call costs milliseconds: it sends a function to the first
``n`` workers, which join a fresh process group of size ``n``, run it, answer, and leave the group again.

Leaving a group and ending a process may hang (seen with torch 2.6): neither loses an answer, and no process outlives
its pool or the process that created the pool.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_megatron import device as devices
from lightning_megatron.comm.objects import drain_group
from lightning_megatron.machine.host import shorten_socket_paths
from lightning_megatron.testing import one_card

PRELOAD = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_megatron",
    "lightning_megatron.testing.workers",
    "lightning_megatron.testing.preloaded",
]


class WorkerError(AssertionError):
    """A function raised on a worker. The text has the rank and the remote traceback; ``__cause__`` the exception."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} raised:\n{text}")


class WorkerTimeoutError(TimeoutError):
    """Workers did not answer in time; the text has the stack of every worker."""


_LEFT = b"left"
_VICTIMS = ("Connection", "gloo", "PeerLostError")
"""Words in the errors of ranks whose peers have failed."""


@dataclass(frozen=True)
class _Task:
    function: bytes
    world_size: int
    store: str
    timeout: float


def _serve(rank: int, tasks: Connection, stacks: str, kind: devices.DeviceKind, cards: int) -> None:
    """Main loop of a worker: take a task, join its process group, run it, send back its result or error.

    Args:
        rank: number of the worker.
        tasks: connection to the pool.
        stacks: file for the stacks of its threads.
        kind: kind of device that the ranks use.
        cards: workers that take a real card each; 0 without real cards.
    """
    import torch
    import torch.distributed as dist

    if cards:
        devices.take_card(torch.device(kind.type), world_size=cards, rank=rank, local_rank=rank)
    if one_card.enabled():
        one_card.become_a_node(rank)
        kind = devices.CUDA
    if kind == devices.HPU:
        devices.hpu_available()  # imports the bridge, which registers its backend
    backend = devices.CPU.backend
    if kind != devices.CPU:
        backend = ",".join(f"{each.type}:{each.backend}" for each in (devices.CPU, kind))
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    torch.set_num_threads(1)
    stack_file = open(stacks, "w")  # noqa: SIM115 - faulthandler keeps it for the life of the process
    faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=True)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # of the test that has started the pool
        os.environ.pop(name, None)
    environment = dict(os.environ)
    gc.freeze()  # imported objects stay alive: collections can skip them
    while (task := tasks.recv()) is not None:
        store = dist.FileStore(  # type: ignore[attr-defined]
            task.store, task.world_size
        )
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.timeout),
            )
            function, args, kwargs = pickle.loads(task.function)
            outcome: tuple[bool, Any] = (True, function(*args, **kwargs))
        except BaseException as error:  # a worker outlives whatever a test does, SystemExit included
            outcome = (False, (error, traceback.format_exc()))
        try:
            payload = pickle.dumps(outcome)
        except Exception:
            what = outcome[1] if outcome[0] else outcome[1][1]
            payload = pickle.dumps((False, (None, f"the result cannot be pickled: {what!r}")))
        tasks.send_bytes(payload)
        if dist.is_initialized():
            if outcome[0] and kind != devices.HPU:
                with suppress(RuntimeError):  # of a rank that has failed
                    drain_group(dist.group.WORLD)
        else:
            # A group that could not be joined keeps its number, and this rank would look for the next one under
            # another name than its peers do. Destroying any group resets torch's count to 0.
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(devices.CPU.backend, store=alone, rank=0, world_size=1)
        dist.destroy_process_group()
        # A Trainer leaves variables such as seeds there, which need not suit the next function's ranks.
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
        # Groups of a mesh live as long as a Trainer, which is a cycle; each has three threads that wake all the time.
        function = args = kwargs = outcome = payload = None  # type: ignore[assignment]
        gc.collect()
        tasks.send_bytes(_LEFT)


def _end_with_the_parent() -> None:
    """Exit when the parent exits: a worker that is stuck in a collective would not notice it."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _fork_server() -> Any:
    shorten_socket_paths()  # the server listens at a socket
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class WorkerPool:
    """Processes that run a function as ranks of a gloo group.

    Args:
        size: the most ranks a call may ask for.
        timeout: seconds after which a call fails with the stacks of all workers, and the pool is restarted.
        grace: seconds that workers have to leave a group after a call, or to end, before they are killed.
        kind: kind of device that the ranks use; on another one than the CPU, its own backend joins gloo.
        takes_cards: True if each worker acquires a real card of that kind; such workers are spawned, since Gaudi's
            software does not survive a fork.
    """

    def __init__(
        self,
        size: int = 8,
        timeout: float = 600.0,
        grace: float = 10.0,
        *,
        kind: devices.DeviceKind = devices.CPU,
        takes_cards: bool = False,
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.grace = grace
        self._kind = kind
        self._cards = size if takes_cards else 0
        self._context: Any = mp.get_context("spawn") if takes_cards else _fork_server()
        self._directory = Path(tempfile.mkdtemp(prefix="lm-workers-"))
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._calls = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on ranks ``0 .. world_size-1`` and return the results by rank.

        Args:
            world_size: ranks of the process group.
            function: importable by name; it finds an initialized gloo group.
            *args: picklable.
            **kwargs: picklable.

        Raises:
            WorkerError: the first failing rank's exception, with its traceback.
            WorkerTimeoutError: if a rank has not answered after ``timeout`` seconds.
        """
        if world_size > self.size:
            raise ValueError(f"world_size={world_size}, but the pool has {self.size} workers")
        self._grow(world_size)
        self._calls += 1
        store = self._directory / f"store-{os.getpid()}-{self._calls}-{time.monotonic_ns()}"
        task = _Task(pickle.dumps((function, args, kwargs)), world_size, str(store), self.timeout)
        busy = {rank: self._workers[rank][1] for rank in range(world_size)}
        try:
            for tasks in busy.values():
                tasks.send(task)
            outcomes = self._collect(busy)
            self._see_off(busy)
        except BaseException:  # a late answer would be mistaken for one of the next call
            self.close()
            raise
        store.unlink(missing_ok=True)
        # A rank that fails makes its peers fail in gloo: show the one that failed first.
        failed = {rank: value for rank, (fine, value) in outcomes.items() if not fine}
        if failed:
            first = min(failed, key=lambda r: (any(word in failed[r][1] for word in _VICTIMS), r))
            error, text = failed[first]
            raise WorkerError(first, text) from error
        return [outcomes[rank][1] for rank in range(world_size)]

    def _collect(self, busy: dict[int, Connection]) -> dict[int, tuple[bool, Any]]:
        outcomes: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout
        while len(outcomes) < len(busy):
            waiting = {tasks: rank for rank, tasks in busy.items() if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self._stacks(waiting.values())
                self.close()
                late = sorted(waiting.values())
                raise WorkerTimeoutError(f"ranks {late} did not answer in {self.timeout} s\n{stacks}")
            for tasks in ready:
                assert isinstance(tasks, Connection)
                rank = waiting[tasks]
                try:
                    outcomes[rank] = pickle.loads(tasks.recv_bytes())
                except EOFError:
                    process = self._workers[rank][0]
                    process.join(5)
                    code = process.exitcode
                    self.close()
                    raise WorkerError(rank, f"the process ended with exit code {code}") from None
            # Once a rank has failed its peers may wait for it in a collective: give them a few seconds, then restart.
            if any(not fine for fine, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + 10.0)
                unheard = [tasks for rank, tasks in busy.items() if rank not in outcomes]
                if unheard and not wait(unheard, timeout=10.0):
                    failed = dict(outcomes)
                    self.close()
                    return failed
        return outcomes

    def _see_off(self, busy: dict[int, Connection]) -> None:
        """Wait until all have left their group. If one does not in time, or dies, close the pool."""
        if not self._workers:  # already closed
            return
        deadline = time.monotonic() + self.grace
        try:
            for tasks in busy.values():
                if not tasks.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                tasks.recv_bytes()
        except (EOFError, OSError):
            self.close()

    def _stacks(self, ranks: Any) -> str:
        shown = []
        for rank in ranks:
            process = self._workers[rank][0]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        files = [self._directory / f"stack-{rank}" for rank in ranks]
        deadline = time.monotonic() + self.grace
        while not all(file.stat().st_size for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.0)  # until all stacks are written
        for rank in ranks:
            shown.append(f"--- rank {rank} ---\n{(self._directory / f'stack-{rank}').read_text()}")
        return "\n".join(shown)

    def _grow(self, world_size: int) -> None:
        self._directory.mkdir(exist_ok=True)
        while len(self._workers) < world_size:
            rank = len(self._workers)
            ours, theirs = self._context.Pipe()
            stacks = self._directory / f"stack-{rank}"
            stacks.touch()
            process = self._context.Process(
                target=_serve,
                args=(rank, theirs, str(stacks), self._kind, self._cards),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that have been started."""
        return [process.pid for process, _ in self._workers if process.pid is not None]

    def close(self) -> None:
        """End all workers, by force if need be; the next :meth:`run` starts new ones."""
        for process, tasks in self._workers:
            process.terminate()
            tasks.close()
        deadline = time.monotonic() + self.grace
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():  # ignores SIGTERM: it has its own handler, or never returns to Python
                process.kill()
                process.join()
        self._workers.clear()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

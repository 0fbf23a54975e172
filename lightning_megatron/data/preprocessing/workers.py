"""Processes that tokenize: lines for one writer, or whole parts of the input."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any, NamedTuple

from lightning_megatron.data.preprocessing.encode import Encoded, EncodeOptions, Encoder, Lines
from lightning_megatron.data.preprocessing.parts import PartFiles, write_part
from lightning_megatron.errors import DataError

_TASKS_A_WORKER = 4
_PAUSE = 0.5

Watch = Callable[[int, int, int], None]
"""Function of documents, bytes of their lines, and bytes of the input as it is stored, all so far."""


class _Worker(NamedTuple):
    encoder: Encoder
    options: EncodeOptions
    counts: Any


_worker: _Worker  # of a worker process


def _start_worker(options: EncodeOptions, counts: Any = None) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends the work
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _worker = _Worker(Encoder(options), options, counts)


def _end_with_the_parent() -> None:
    """End if the parent was killed: workers hold both ends of their queues, and would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(lines: Lines) -> Encoded:
    return _worker.encoder(lines)


def _write(part: PartFiles) -> None:
    write_part(part, _worker.options, _worker.encoder, partial(_count, part.number))


def _count(number: int, *so_far: int) -> None:
    if _worker.counts[-1]:
        raise InterruptedError("the run ends")
    _worker.counts[3 * number : 3 * number + 3] = so_far


@contextmanager
def _pool(workers: int, *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    # Clean processes, since a forked child of a process with threads may hang. Not by a fork server: it listens at a
    # socket in TMPDIR, whose whole path must be shorter than 108 characters.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, arguments)
    try:
        yield pool
    except BrokenProcessPool:
        do = "see the system's log: out of memory? Take fewer workers"
        raise DataError(f"a worker died before its work was done; {do}") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encoded(
    lines: Iterator[Lines], encoder: Encoder, options: EncodeOptions, workers: int
) -> Generator[Encoded, None, None]:
    """Tokenized documents in the order of the input; only some of them are in memory at any time."""
    if workers == 1:
        yield from map(encoder, lines)
        return
    with _pool(workers, options) as pool:
        pending: deque[Future[Encoded]] = deque()
        for task in lines:
            pending.append(pool.submit(_encode, task))
            if len(pending) >= workers * _TASKS_A_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def write_parts(parts: Sequence[PartFiles], options: EncodeOptions, workers: int, watch: Watch) -> None:
    """Tokenize parts of the input, ``workers`` at a time, and call ``watch`` from time to time.

    Raises:
        DataError: if a part has a fault; those that are complete stay.
    """
    complete = [done for part in parts if (done := part.done()) is not None]
    before = sum(d.documents for d in complete), sum(d.text for d in complete)
    stored = sum(part.size for part in parts if part.done() is not None)
    left = [part for part in parts if part.done() is None]
    counts = get_context("spawn").Array("q", 3 * len(parts) + 1, lock=False)

    def tell() -> None:
        documents, text, now = (sum(counts[i:-1:3]) for i in range(3))
        watch(before[0] + documents, before[1] + text, stored + now)

    if not left:
        return tell()
    with _pool(min(workers, len(left)), options, counts) as pool:
        pending = {pool.submit(_write, part) for part in left}
        try:
            while pending:
                ended, pending = wait(pending, _PAUSE, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                tell()
        finally:
            counts[-1] = 1
            for future in pending:
                future.cancel()
    return None

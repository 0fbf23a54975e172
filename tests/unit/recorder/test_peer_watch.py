"""The watch of a rank: files that it reads, the time after which all ranks have ended, and ranks that do not end."""

from __future__ import annotations

import builtins
import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.lightning.launch import children
from lightning_megatron.recorder import recorder as recorder_module
from lightning_megatron.recorder import watch
from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.recorder import Recorder
from lightning_megatron.recorder.watch import PeerWatch
from tests.forked import forked

WORLD, ON_A_HOST = 64, 8


def watch_of(recorder: Recorder, rank: int, timeout: float = 1800.0) -> PeerWatch:
    first = rank // ON_A_HOST * ON_A_HOST
    return PeerWatch(recorder, rank, range(first, first + ON_A_HOST), WORLD, timeout, lambda: None, dict)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Recorder]]:
    """Open files of 64 ranks on 8 hosts."""
    recorders = [Recorder() for _ in range(WORLD)]
    for rank, recorder in enumerate(recorders):
        recorder.open(tmp_path, rank, WORLD)
        recorder.describe({"host": socket.gethostname() if rank < ON_A_HOST else "elsewhere"})
    yield recorders
    for recorder in recorders:
        recorder.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are opened."""
    names: list[str] = []

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def open_(path: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(Path(path).name)
            return real(path, *args, **kwargs)

        return open_

    monkeypatch.setattr(builtins, "open", counting(builtins.open))
    monkeypatch.setattr(io, "open", counting(io.open))
    return names


def read_in_a_look(peers: PeerWatch, opened: list[str]) -> set[int]:
    """Ranks whose files are read; each at most once, since the descriptions are known by then."""
    opened.clear()
    assert peers._failed_peer() is None
    ranks = [int(name[:5]) for name in opened if name.endswith(".actions")]
    assert len(ranks) == len(set(ranks))
    return set(ranks)


def test_a_look_reads_the_own_host_and_a_bounded_number_of_other_ranks(
    ranks: list[Recorder], opened: list[str]
) -> None:
    rank, local, others = 10, set(range(8, 16)) - {10}, set(range(64)) - set(range(8, 16))
    peers = watch_of(ranks[rank], rank)
    looks = [read_in_a_look(peers, opened) for _ in range(len(others) // watch.REMOTE)]
    assert all(local <= look for look in looks)
    assert {len(look - local) for look in looks} == {watch.REMOTE}
    assert set().union(*looks) == local | others  # all have had their turn
    opened.clear()
    peers._failed_peer()
    assert len(opened) <= len(local) + watch.REMOTE

    log = ranks[rank].main
    token = log.begin(Kind.ALL_REDUCE, 1)
    assert len(read_in_a_look(peers, opened) - local) == watch.REMOTE
    since = log.waiting_since
    assert since
    clock = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: clock() + int(2 * watch.LONG * 1e9))
        looks = [read_in_a_look(peers, opened) for _ in range(4)]
    assert {len(look - local) for look in looks} == {watch.REMOTE_WAITING}
    assert set().union(*looks) == local | others
    log.end(token)
    assert len(read_in_a_look(peers, opened) - local) == watch.REMOTE


def test_files_of_the_own_host_are_opened_once(ranks: list[Recorder], opened: list[str]) -> None:
    peers = watch_of(ranks[0], 0)
    assert set(range(1, ON_A_HOST)) <= read_in_a_look(peers, opened)
    peers._failed_peer()  # once more, now that their host is known
    for _ in range(3):
        assert not set(range(ON_A_HOST)) & read_in_a_look(peers, opened)
    ranks[3].open(ranks[3].folder, 3, WORLD)  # a new run in the same folder: a new file takes the name
    assert 3 in read_in_a_look(peers, opened)
    ranks[3].set_state(State.RAISED, "x")
    assert (failed := peers._failed_peer()) is not None
    assert failed.rank == 3
    peers.stop()


@pytest.mark.parametrize("world", [64, 128, 1024])
def test_ranks_of_a_large_job_together_read_no_more_files_than_those_of_a_small_one(
    ranks: list[Recorder], world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of the job takes part in 16 checks."""
    probed: list[int] = []
    monkeypatch.setattr(watch.FailureProbe, "has_failed", lambda probe: bool(probed.append(probe.rank)))
    by_check = [0] * 16
    for rank in range(world):
        peers = PeerWatch(ranks[0], rank, [rank], world, 1800.0, lambda: None, dict)
        for check in range(16):
            before = len(probed)
            assert peers._failed_peer() is None
            by_check[check] += len(probed) - before
    assert set(by_check) == {watch.MANY * watch.REMOTE}
    assert len(set(probed)) == world


def test_a_failure_on_another_host_is_found_in_turn_and_then_kept_in_view(ranks: list[Recorder]) -> None:
    peers = watch_of(ranks[0], 0)
    ranks[63].set_state(State.RAISED, "x")
    looks = 0
    while (failed := peers._failed_peer()) is None:
        looks += 1
    assert failed.rank == 63
    assert looks < 56 / watch.REMOTE
    assert peers._trouble() == ("rank 63 has failed", watch.GRACE)
    assert peers._trouble() == ("rank 63 has failed", watch.GRACE)


def test_all_ranks_have_ended_five_seconds_after_the_timeout() -> None:
    assert watch.LATE + watch.EVERY + watch.GRACE + watch.EVERY / 2 < 5.0
    # A launching rank lets its processes find out by themselves, then ends them.
    assert children.GRACE >= watch.EVERY + watch.GRACE + watch.EVERY / 2
    assert watch.LATE + children.GRACE + children.LAST_WORD <= 5.0
    assert watch.SETTLES < watch.GRACE


def test_a_look_comes_when_a_collective_is_due(ranks: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = ranks[0].main, time.time_ns()
    for module in (time, recorder_module):
        monkeypatch.setattr(module, "time_ns", lambda: now)
    peers = watch_of(ranks[0], 0, timeout=0.4 - watch.LATE)
    assert peers._pause(False) == watch.EVERY
    assert peers._pause(True) == watch.EVERY / 2
    log.begin(Kind.ALL_REDUCE, 1)
    now += 100_000_000
    assert peers._pause(False) == pytest.approx(0.3)
    now += 400_000_000
    assert peers._pause(False) == watch.EVERY
    reason, patience = peers._trouble()
    assert reason is not None
    assert "kept it waiting" in reason
    assert patience == 0.0


def test_a_wait_for_the_device_counts_as_one_for_other_ranks(ranks: list[Recorder]) -> None:
    with ranks[0].main.during(Kind.DEVICE):
        assert ranks[0].main.waiting_since
    assert not ranks[0].main.waiting_since


@pytest.mark.parametrize("others_come", [False, True])
def test_a_host_that_runs_ahead_is_ended_where_others_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_come: bool
) -> None:
    """The wait is in a place that nothing records; rank 0 has begun more than the ring of its last actions holds."""
    recorders = [Recorder() for _ in range(2)]
    for rank, recorder in enumerate(recorders):
        recorder.open(tmp_path, rank, 2)
        groups = recorder.group("tp", [0, 1]), recorder.group("dp", [0, 1])
        recorder.describe({"host": socket.gethostname(), "runs_ahead": True, "timeout": 5.0})
        for group, count in zip(groups, (300, 4 if rank == 0 or others_come else 3), strict=True):
            for _ in range(count):
                recorder.main.end(recorder.main.begin(Kind.ALL_REDUCE, group))
    peers = PeerWatch(recorders[0], 0, range(2), 2, 5.0, lambda: None, dict)
    assert peers._trouble() == (None, 0.0)
    clock, later = time.time_ns, 10 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: clock() + later)
    monkeypatch.setattr(peers, "_looked", -watch.AGAIN)
    reason, _ = peers._trouble()
    assert (reason is None) == others_come
    assert reason is None or "kept it waiting" in reason
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize("state", [State.RAISED, State.LOST])
def test_a_rank_that_has_failed_and_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    monkeypatch.setattr(watch, "EVERY", 0.1)
    monkeypatch.setattr(watch, "GRACE", 0.1)
    errors = tmp_path / "stderr"

    def hang() -> None:
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            recorder = Recorder()
            recorder.open(tmp_path / "run", 0, WORLD)
            peers = watch_of(recorder, 0, timeout=0.5)
            peers.start()
            recorder.set_state(state, "ValueError: x")
            time.sleep(600)

    assert forked(hang) == 1
    text = errors.read_text()
    assert "Rank 0 is ended, since" in text
    if state == State.RAISED:
        assert "it raised an error 0 s ago and has not ended yet" in text
    assert "test_peer_watch.py" in text  # where its main thread was


def test_a_rank_whose_launcher_has_ended_is_to_end(ranks: list[Recorder]) -> None:
    for launcher, reason in ((None, None), (os.getppid(), None), (1 << 30, "process 1073741824, which launched it")):
        one = PeerWatch(ranks[0], 0, range(ON_A_HOST), WORLD, 1800.0, lambda: None, dict, launcher)
        found, patience = one._trouble()
        assert (found is None) == (reason is None)
        assert found is None or (found.startswith(reason) and patience == watch.GRACE)

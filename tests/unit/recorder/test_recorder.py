"""The file of a rank: what is under way, what came last, and that it can be read when the rank is dead."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.machine.transport import is_lost_connection
from lightning_megatron.recorder.call import Call, PeerLostError
from lightning_megatron.recorder.diagnosis import describe_actions
from lightning_megatron.recorder.file_format import DEPTH, LAST, Kind, State
from lightning_megatron.recorder.process import Process, ProcessState, describe_exit
from lightning_megatron.recorder.reading import (
    FailureProbe,
    RankView,
    Record,
    last_written,
    read_rank,
    read_run,
    runs_below,
)
from lightning_megatron.recorder.recorder import Recorder, note_process_state
from lightning_megatron.recorder.runs import remove_finished, remove_old, run_folder
from lightning_megatron.tools.cli.main import main
from tests.forked import forked


def opened(folder: Path, rank: int = 0, world_size: int = 1) -> Recorder:
    recorder = Recorder()
    recorder.open(folder, rank, world_size)
    return recorder


def view_of(folder: Path, rank: int = 0) -> RankView:
    view = read_rank(folder, rank)
    assert view is not None
    return view


def test_actions_under_way_and_the_last_ones_are_read_with_place_and_group(tmp_path: Path) -> None:
    recorder, action_log = opened(tmp_path), None
    action_log = recorder.main
    tp, dp = recorder.group("tp", [0, 1]), recorder.group("dp", range(0, 4096, 2))
    recorder.describe({"host": "", "device": "cpu"})
    action_log.step, action_log.microbatch, action_log.stage = 7, 2, 1
    with action_log.during(Kind.TRAINING_STEP), action_log.during(Kind.FORWARD):
        early = action_log.begin(Kind.ALL_REDUCE, dp, 1 << 20, waits=False)
        for _ in range(3):
            action_log.end(action_log.begin(Kind.ALL_GATHER, tp, 4096))
        action_log.begin(Kind.ALL_GATHER, tp, 4096)
        view = view_of(tmp_path)
        assert describe_actions(view) == (
            "step 7, training step of stage 1 micro-batch 2 > forward of stage 1 micro-batch 2 > "
            "all_gather 4 over tp, 4.0 KiB"
        )
        assert view.waits_in is not None
        assert (view.waits_in.within, view.reached("tp"), view.reached("dp")) == (4, 4, 1)
        assert view.groups["dp"] == tuple(range(0, 4096, 2))
        assert view.is_alive
    view = view_of(tmp_path)
    assert not view.under_way
    assert str(view.last[2]) == "all_reduce 1 over dp, 1.0 MiB"
    assert not view.last[2].ended
    early = action_log.wait(early)
    assert str(view_of(tmp_path).waits_in) == "all_reduce 1 over dp, 1.0 MiB"
    action_log.end(early)
    assert view_of(tmp_path).last[2].ended


def test_a_rank_knows_since_when_it_waits_and_sees_others_fail(tmp_path: Path) -> None:
    recorder, other = opened(tmp_path, 0, 2), opened(tmp_path, 1, 2)
    action_log, group = recorder.main, recorder.group("tp", [0, 1])
    probe = FailureProbe(tmp_path, 1)
    assert not action_log.waiting_since
    with action_log.during(Kind.FORWARD):
        assert not action_log.waiting_since
        token = action_log.begin(Kind.ALL_REDUCE, group)
        assert action_log.waiting_since == view_of(tmp_path).last[-1].waiting > 0
        action_log.end(token)
        assert not action_log.waiting_since
    with action_log.during(Kind.RENDEZVOUS):
        assert action_log.waiting_since
    assert not probe.has_failed()
    other.describe({"host": socket.gethostname()})
    assert not probe.has_failed()
    other.set_state(State.RAISED, "x")
    assert probe.has_failed()
    assert not FailureProbe(tmp_path, 5).has_failed()
    forked(lambda: opened(tmp_path, 1, 2).describe({"host": socket.gethostname()}))
    assert probe.has_failed()


def test_what_was_begun_long_ago_is_still_known_when_the_ring_has_gone_round(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    action_log = recorder.main
    group = recorder.group("tp", [0, 1])
    with action_log.during(Kind.VALIDATION_STEP):
        for _ in range(3 * LAST):
            action_log.end(action_log.begin(Kind.ALL_REDUCE, group))
        view = view_of(tmp_path)
        assert [record.kind for record in view.under_way] == [Kind.VALIDATION_STEP]
        assert len(view.last) == LAST
        assert view.reached(view.last[-1].group) == 3 * LAST
    assert not view_of(tmp_path).under_way


def test_more_actions_inside_each_other_than_there_is_room_for(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    tokens = [recorder.main.begin(Kind.FORWARD) for _ in range(DEPTH + 3)]
    assert len(view_of(tmp_path).under_way) == DEPTH
    for token in reversed(tokens):
        recorder.main.end(token)
    assert not view_of(tmp_path).under_way


def test_where_an_error_began_is_kept_and_errors_that_follow_from_it_change_nothing(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    action_log = recorder.main

    def fail() -> None:
        with action_log.during(Kind.OPTIMIZER_STEP):
            try:
                with action_log.during(Kind.FORWARD):
                    raise ValueError("x")
            except ValueError as error:
                raise KeyError("y") from error

    with pytest.raises(KeyError):
        fail()
    with action_log.during(Kind.END):
        pass
    recorder.set_state(State.RAISED, "KeyError: y")
    recorder.set_state(State.FINISHED)
    view = view_of(tmp_path)
    assert [record.kind for record in view.under_way] == [Kind.OPTIMIZER_STEP, Kind.FORWARD]
    assert (view.state, view.error) == (State.RAISED, "KeyError: y")


def test_a_backends_complaint_of_a_lost_peer_gets_the_name_that_the_watch_finds(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.blame = lambda doing: f"{doing}: rank 3 is dead"

    def fail(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(PeerLostError, match="all_reduce over tp: rank 3 is dead") as caught:
        Call(recorder.main, Kind.ALL_REDUCE, "tp", 1).run(fail, "[pair.cc:534] Connection closed by peer [::1]:11922")
    assert "Connection closed" in str(caught.value.__cause__)
    call = Call(recorder.main, Kind.ALL_REDUCE, "tp", 1)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        call.issue(fail, "Tensors must be contiguous")
    with pytest.raises(PeerLostError, match="a peer has failed"):
        Call(None, Kind.SEND, "pp", 0, peer=1).run(fail, "Timed out waiting 12000ms for recv operation to complete")
    assert not is_lost_connection(ValueError("connection closed"))


def test_a_killed_process_leaves_a_file_that_says_in_what_it_died(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = run_folder(tmp_path, "1234", {})

    def die(rank: int) -> None:
        recorder = opened(folder, rank, 2)
        group = recorder.group("tp", [0, 1])
        recorder.describe({"host": "", "device": "cpu"})
        recorder.main.step = 5
        recorder.main.begin(Kind.SAVE)
        if rank:
            recorder.main.begin(Kind.ALL_GATHER_OBJECT, group)
        os.kill(os.getpid(), signal.SIGKILL)

    assert [forked(partial(die, rank)) for rank in range(2)] == [-signal.SIGKILL] * 2
    views = read_run(folder)
    assert [view.is_dead for view in views] == [True, True]
    assert main(["why", str(tmp_path), "--last", "3"]) == 0
    printed = capsys.readouterr().out
    assert "First to blame: rank 0" in printed
    assert "step 5, save > all_gather_object 1 over tp" in printed
    assert "rank 1, its last actions:" in printed
    assert main(["why", str(folder), "--json", "--last", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][1]["last"][0]["kind"] == "all_gather_object"
    note_process_state(folder, 1, ProcessState.DEAD, -9)
    assert views[1].process.status is None
    assert view_of(folder, 1).process.status == -9
    assert describe_exit(-9) == "killed by SIGKILL"
    assert main(["why", str(tmp_path / "nothing")]) == 2
    assert main(["why", str(Path(__file__).parent)]) == 2


def test_a_run_that_all_ranks_finish_leaves_nothing_and_old_ones_are_swept(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "1", {"SLURM_JOB_ID": "7"})
    assert folder.name == "run-1-7"
    recorders = [opened(folder, rank, 2) for rank in range(2)]
    for recorder in recorders:
        assert (folder / "00000.actions").exists()
        recorder.set_state(State.FINISHED)
        recorder.close()
        remove_finished(folder)
    assert not list(tmp_path.iterdir())

    for number in range(6):
        recorder = opened(run_folder(tmp_path, str(number), {}))
        recorder.set_state(State.RAISED, "x")
        recorder.close()
    running = opened(run_folder(tmp_path, "running", {}))
    remove_old(tmp_path)
    left = sorted(path.name for path in (tmp_path / ".actions").iterdir())
    assert len(left) == 4
    assert "run-running" in left
    running.close(remove=True)


def test_runs_that_go_or_come_meanwhile_are_left_alone(tmp_path: Path) -> None:
    going, coming, old = (run_folder(tmp_path, name, {}) for name in ("going", "coming", "old"))
    for folder in (going, coming, old):
        folder.mkdir(parents=True)
    (going / "00000.actions").symlink_to(tmp_path / "removed by another process after the folder was listed")
    (coming / "00000.actions").touch()  # and its first bytes follow
    (old / "00000.actions").write_bytes(b"another format")
    os.utime(old / "00000.actions", (0, 0))
    assert runs_below(tmp_path) == [coming, old]
    remove_old(tmp_path)
    assert runs_below(tmp_path) == [coming]
    assert runs_below(tmp_path / "gone") == []


@pytest.mark.parametrize("look", [read_run, last_written, remove_finished, runs_below], ids=lambda look: look.__name__)
def test_a_folder_that_another_process_removes_while_it_is_listed_is_a_run_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], object]
) -> None:
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "00000.actions").touch()
    scandir = os.scandir

    def late(folder: Any) -> Any:
        if Path(folder) == run:
            monkeypatch.setattr(os, "scandir", scandir)
            shutil.rmtree(run)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", late)
    assert not look(run)
    assert not run.exists()


def test_a_record_is_of_one_process_and_goes_on_in_memory_without_a_file(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    copy = pickle.loads(pickle.dumps(recorder.main))
    assert copy.recorder.folder is None
    copy.end(copy.begin(Kind.FORWARD))
    recorder.close()
    recorder.main.end(recorder.main.begin(Kind.FORWARD))
    with pytest.raises(NotADirectoryError):
        recorder.open(Path(__file__) / "below-a-file", 0, 1)


def test_files_keep_their_layout_and_one_of_another_version_is_not_read(tmp_path: Path) -> None:
    header = struct.pack("<8siiiiqqqqiqi", b"LMACTS02", 2**22, 0, 1, State.RAISED, 10, 11, 12, 13, 2, 14, -9)
    texts = header.ljust(128, b"\0") + b"a path".ljust(256, b"\0") + b"an error".ljust(640, b"\0")
    action = struct.pack("<QqqqQIiiiHHhH", 3, 20, 21, 22, 4096, 5, 6, 7, -1, Kind.ALL_REDUCE, 1, 2, 1)
    ring = (bytes(2 * 64) + action).ljust(256 * 64, b"\0") + struct.pack("<64I", 0, 6, *range(62))
    path = tmp_path / "00000.actions"
    path.write_bytes(texts + bytes(8 * 64) + 2 * (bytes(8 * 64) + ring))
    view = view_of(tmp_path)
    assert (view.pid, view.world_size, view.state, view.error) == (2**22, 1, State.RAISED, "an error")
    assert (view.begun, view.since, view.beat, view.process) == (10, 11, 13, Process(ProcessState.DEAD, -9))
    record = Record(3, Kind.ALL_REDUCE, 20, 21, 22, 4096, 5, 6, 7, -1, "group 1", 2, "a path")
    assert view.last == (record, record)
    path.write_bytes(path.read_bytes().replace(b"LMACTS02", b"LMACTS01"))
    assert read_rank(tmp_path, 0) is None


def test_the_exit_status_of_a_rank_that_nobody_knows_stays_unknown(tmp_path: Path) -> None:
    opened(tmp_path)
    note_process_state(tmp_path, 0, ProcessState.DEAD, 0)
    assert view_of(tmp_path).process == Process(ProcessState.DEAD)


def test_a_long_text_keeps_its_end_and_any_text_can_be_written(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.set_state(State.RAISED, f"Caught ValueError in a worker {'é' * 1000} \ud800 ValueError: on purpose")
    assert view_of(tmp_path).error.startswith("Caught ValueError in a worker")
    assert view_of(tmp_path).error.endswith("ValueError: on purpose")

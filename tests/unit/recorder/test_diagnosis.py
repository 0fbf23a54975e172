"""Rank to blame, from the ranks' files and the system."""

from __future__ import annotations

import signal

import pytest

from lightning_megatron.recorder.diagnosis import describe_state, diagnose
from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.process import Process, ProcessState
from lightning_megatron.recorder.reading import RankView, Record
from lightning_megatron.recorder.table import render

TP, DP, WORLD = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}, (0, 1, 2, 3)
STOPPED, DEAD = Process(ProcessState.STOPPED), Process(ProcessState.DEAD, -signal.SIGKILL)


def rank(number: int, *under_way: Record, done: tuple[Record, ...] = (), **more: object) -> RankView:
    own = {"tp": TP[number], "dp": DP[number], "world": WORLD}
    options = {"pid": 100 + number, "state": State.RUNNING, "host": "h", "begun": 1, "groups": own, "world_size": 4}
    return RankView(number, under_way=under_way, last=(*done, *under_way), **(options | more))


def waits(group: str, within: int, begun: int = 10, peer: int = -1) -> Record:
    kind = Kind.RECEIVE if peer >= 0 else Kind.ALL_REDUCE
    return Record(within, kind, begun, waiting=begun, within=within, group=group, peer=peer, step=3)


def works(kind: Kind = Kind.FORWARD, begun: int = 10) -> Record:
    return Record(1, kind, begun, waiting=begun, step=3)


def ended(group: str, within: int) -> Record:
    return Record(within, Kind.ALL_REDUCE, 5, waiting=5, ended=6, within=within, group=group)


def test_a_rank_that_is_dead_comes_before_those_that_wait_for_it() -> None:
    views = [rank(0, waits("tp", 4)), rank(1, works(), process=DEAD), rank(2, waits("dp", 2)), rank(3, waits("dp", 2))]
    diagnosis = diagnose(views)
    assert diagnosis.culprits == (1,)
    assert diagnosis.is_fact
    assert diagnosis.reason == "rank 1 (pid 101 on h) dead: killed by SIGKILL in step 3, forward"
    table = render(views, diagnosis, 2_000_000_010).splitlines()
    assert table[2].split()[0] == "1"
    assert [line.split()[0] for line in table[3:]] == ["0", "2", "3"]
    assert table[2].endswith("2.0 s")


def ahead(number: int, *under_way: Record, done: tuple[Record, ...] = (), **more: object) -> RankView:
    """A rank on a device where a collective is over for the host once it has begun."""
    return rank(number, *under_way, done=done, runs_ahead=True, timeout=600.0, **more)


GONE = {"process": Process(ProcessState.DEAD), "beat": 700 * 10**9}
"""A rank of which nothing is known but that it was inactive for 700 seconds before."""


@pytest.mark.parametrize(
    "victim",
    [{}, {"process": Process(ProcessState.DEAD, -signal.SIGABRT)}, GONE],
    ids=["while it hangs", "aborted", "reaped by the launcher"],
)
@pytest.mark.parametrize("host_waits_in", [Kind.DEVICE, Kind.FORWARD], ids=["recorded wait", "wait of the user's code"])
def test_where_the_host_runs_ahead_the_rank_behind_is_to_blame(host_waits_in: Kind, victim: dict[str, object]) -> None:
    """Held against what has happened: rank 1 hangs in its loader, and rank 0 is a step ahead."""
    views = [
        ahead(0, works(host_waits_in, 20), done=(ended("tp", 3), ended("tp", 4)), **victim),
        ahead(1, works(Kind.DATA), done=(ended("tp", 3),)),
    ]
    diagnosis = diagnose(views)
    assert (diagnosis.culprits, diagnosis.is_fact) == ((1,), False)
    assert diagnosis.reason.endswith("waiting for data: others wait for it in all_reduce 4 over tp")


def test_a_launcher_that_ends_all_after_an_abort_hides_no_culprit() -> None:
    views = [
        ahead(0, works(Kind.DEVICE, 20), done=(ended("tp", 4),), process=Process(ProcessState.DEAD, -signal.SIGABRT)),
        ahead(1, works(Kind.USER), done=(ended("tp", 3),), **GONE),
    ]
    assert diagnose(views).culprits == (1,)


def test_a_rank_that_died_in_the_middle_of_its_work_is_to_blame_though_it_waited_for_its_device() -> None:
    views = [
        ahead(0, works(Kind.DEVICE, 10), done=(ended("tp", 4),), process=Process(ProcessState.DEAD), beat=10**9),
        ahead(1, works(Kind.DEVICE, 20), done=(ended("tp", 3),)),
    ]
    assert (diagnose(views).culprits, diagnose(views).is_fact) == ((0,), True)


def message(kind: Kind, peer: int, within: int, waiting: int = 5) -> Record:
    return Record(within, kind, 5, waiting=waiting, ended=6, within=within, group="pp", peer=peer)


def test_a_stage_that_has_not_sent_is_behind_the_one_that_receives() -> None:
    # 1 waits for its device in code of the user, for what 0 sends; it also expects the next message, but not yet.
    sent = message(Kind.SEND, 1, 1), message(Kind.RECEIVE, 1, 1, waiting=0)
    received = message(Kind.RECEIVE, 0, 1), message(Kind.RECEIVE, 0, 2), message(Kind.SEND, 0, 0)
    views = [ahead(0, works(), done=sent), ahead(1, works(begun=3), done=received)]
    assert diagnose(views).culprits == (0,)
    views[1] = ahead(1, works(begun=3), done=received[:1])
    assert diagnose(views).culprits == ()


def test_chains_go_over_ranks_that_wait_on_the_host_and_on_the_device() -> None:
    # 0 waits for 1 over the host's group, 1 has started what 3 has not come to, and 3 runs a callback.
    views = [
        ahead(0, waits("world", 5)),
        ahead(1, works(Kind.DEVICE, 30), done=(ended("dp", 7),)),
        ahead(2, waits("world", 5)),
        ahead(3, works(Kind.USER, 20), done=(ended("dp", 6),)),
    ]
    assert diagnose(views).culprits == (3,)


def test_a_host_that_stays_in_a_collective_is_to_blame_where_it_should_run_ahead() -> None:
    views = [ahead(0, works(Kind.DEVICE), done=(ended("tp", 4),)), ahead(1, works(), waits("tp", 4))]
    assert diagnose(views).culprits == (1,)
    assert "all_reduce 4 over tp" in diagnose(views).reason
    assert diagnose([ahead(n, waits("tp", 4)) for n in range(2)]).culprits == ()


def test_nobody_is_behind_where_all_have_started_the_same() -> None:
    views = [ahead(n, works(Kind.DEVICE), done=(ended("tp", 4),)) for n in range(2)]
    assert diagnose(views).culprits == ()


def test_the_first_of_several_that_failed_is_to_blame_and_who_lost_a_peer_is_not() -> None:
    views = [
        rank(0, state=State.LOST, since=50),
        rank(1, state=State.RAISED, since=30, error="ValueError: x"),
        rank(2, works(begun=40), process=DEAD),
        rank(3, state=State.FINISHED),
    ]
    assert diagnose(views).culprits == (1, 2)
    assert [describe_state(view) for view in views][:2] == ["lost a peer", "raised ValueError: x"]
    views[1] = rank(1, works(), process=Process(ProcessState.ENDED_BY_LAUNCHER))
    assert diagnose(views).culprits == (2,)


def test_a_stopped_rank_is_to_blame_also_when_others_have_ended() -> None:
    views = [rank(0, waits("tp", 4), state=State.LOST), rank(1, works(), process=STOPPED)]
    assert diagnose(views).culprits == (1,)
    assert diagnose(views).is_fact


def test_who_is_waited_for_is_followed_to_the_one_that_waits_for_nobody() -> None:
    # 0 waits for 1 over tp; 1 waits for 3 over dp; 3 computes; 2 waits for 3 over tp.
    views = [
        rank(0, waits("tp", 4)),
        rank(1, waits("dp", 2), done=(ended("tp", 3),)),
        rank(2, waits("tp", 9)),
        rank(3, works(), done=(ended("tp", 8), ended("dp", 1))),
    ]
    diagnosis = diagnose(views)
    assert (diagnosis.culprits, diagnosis.is_fact) == ((3,), False)
    assert "rank 3 (pid 103 on h) is running in step 3, forward: others wait for it in all_reduce 4 over tp" in str(
        diagnosis.reason
    )


def test_of_two_that_are_waited_for_the_one_with_more_waiters_comes_first() -> None:
    # 3 waits for 1 over dp, and 2 for all others over world; 0 and 1 compute.
    views = [rank(0, works()), rank(1, works(begun=20)), rank(2, waits("world", 5)), rank(3, waits("dp", 2))]
    assert diagnose(views).culprits == (1, 0)


def test_a_rank_whose_collective_was_only_started_has_come() -> None:
    started = Record(7, Kind.ALL_REDUCE, 8, within=4, group="tp")
    views = [rank(0, waits("tp", 4)), rank(1, works(), done=(started,))]
    assert diagnose(views).culprits == ()


def test_the_other_end_of_a_message_is_waited_for() -> None:
    views = [rank(0, waits("pp", 0, peer=1)), rank(1, works(Kind.BACKWARD))]
    assert diagnose(views).culprits == (1,)


def test_what_a_backends_watchdog_aborts_is_a_victim() -> None:
    aborted = Process(ProcessState.DEAD, -signal.SIGABRT)
    views = [rank(0, waits("tp", 4), process=aborted), rank(1, works(), done=(ended("tp", 3),))]
    assert diagnose(views).culprits == (1,)
    assert diagnose([rank(0, works(), process=aborted), rank(1, works())]).culprits == (0,)


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    views = [rank(0, waits("tp", 4), done=(ended("dp", 5),)), rank(1, waits("world", 6), done=(ended("tp", 3),))]
    diagnosis = diagnose(views)
    assert diagnosis.culprits == (0, 1)
    assert "each other" in diagnosis.reason


def test_a_rank_that_never_came_is_to_blame_before_the_start_only() -> None:
    start = Record(1, Kind.RENDEZVOUS, 5, waiting=5)
    assert diagnose([rank(0, start), RankView(1)]).culprits == (1,)
    views = [rank(0, waits("tp", 2), done=(works(Kind.SETUP),)), RankView(1)]
    assert not diagnose(views).is_fact
    assert describe_state(RankView(1)) == "has not come"


def test_a_rank_that_is_elsewhere_while_others_meet_is_to_blame() -> None:
    meets = Record(2, Kind.RENDEZVOUS, 5, waiting=5)
    diagnosis = diagnose([rank(0, works(Kind.LOAD)), rank(1, meets, state=State.LOST), rank(2, meets)])
    assert (diagnosis.culprits, diagnosis.is_fact) == ((0,), False)
    assert "rank 0 (pid 100 on h) is running in step 3, load: others wait for it in" in diagnosis.reason
    assert not diagnose([rank(0, meets), rank(1, meets)]).culprits


def test_nobody_stands_out_where_all_is_well() -> None:
    views = [rank(0, waits("tp", 4)), rank(1, waits("tp", 4))]
    assert diagnose(views).culprits == ()
    assert render(views, diagnose(views), 10).startswith("No rank stands out.")

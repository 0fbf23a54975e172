"""The checker finds each kind of fault, and says where."""

import pytest

from lightning_megatron.pipeline.action import Action, Message, Schedule, message_in, message_out
from lightning_megatron.pipeline.schedule import build_schedule, forward_only, interleaved, one_f_one_b, zero_bubble
from lightning_megatron.pipeline.send_recv import Transfer, add_transfers
from lightning_megatron.pipeline.validate import check_schedule, check_transfers
from tests.schedules import parse_action, parse_schedule


def rows(*lines: str) -> Schedule:
    return parse_schedule("".join(line.replace(" ", ",") + "\n" for line in lines))


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (rows("0F0 0B0", "1B0 1F0"), "rank 1: 1B0 before 1F0"),
        (rows("0F0 0B0", "1F0 1W0 1I0"), "rank 1: 1W0 before 1I0"),
        (rows("0F0 0B0", "1F0"), "rank 1: 1B0 is missing"),
        (rows("0F0 0B0", "1F0 1I0"), "rank 1: 1W0 is missing"),
        (rows("0F0 0B0", "1F0 1W0"), "rank 1: 1I0 is missing"),
        (rows("0B0", "1F0 1B0"), "rank 0: 0F0 is missing"),
        (rows("0F0 0B0", "1F0 1F0 1B0"), "rank 1: 1F0 2 times"),
        (rows("0F0 0B0", "1F0 1B0 1I0 1W0"), "rank 1: 1B0 besides another backward of it"),
        (rows("0F0 0B0 1F0 1B0", ""), "rank 0: 1F0 belongs to rank 1"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0: 0B0 waits for the gradient 0 of stage 1 for stage 0"),
        (rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 1: 1F1 waits for the activation 1 of stage 0 for stage 1"),
    ],
)
def test_faults_are_named(schedule: Schedule, fault: str) -> None:
    faults = check_schedule(schedule).faults
    assert any(line.startswith(fault) for line in faults), faults


def test_a_missing_stage_is_missed() -> None:
    assert "rank 0: 2F0 is missing" in check_schedule(rows("0F0 0B0", "1F0 3F0 3B0 1B0")).faults


def test_backward_in_evaluation() -> None:
    assert check_schedule(one_f_one_b(2, 1), forward_only=True).faults[0] == "rank 0: 0B0 in a forward-only schedule"
    assert check_schedule(forward_only(2, 1, 3), forward_only=True).peak_activations == (0, 0)


def test_reports_order_and_rendezvous() -> None:
    plain = check_schedule(one_f_one_b(4, 8))
    assert (plain.in_order, plain.rendezvous_safe, plain.peak_activations) == (True, True, (4, 3, 2, 1))
    # Three micro-batches of a group on two ranks: rank 1 needs an activation that rank 0 sends after a gradient.
    mixed = check_schedule(interleaved(2, 2, 5))
    assert (mixed.faults, mixed.in_order, mixed.rendezvous_safe) == ((), False, False)
    # With blocking batches, rank 0 sends an activation that the last rank does not yet want.
    assert not check_schedule(interleaved(4, 2, 8)).rendezvous_safe


def test_messages_of_actions() -> None:
    assert message_in(Action(0, "F", 1), 4) is None
    assert message_in(Action(3, "B", 1), 4) is None
    assert message_in(Action(2, "W", 1), 4) is None
    assert message_in(Action(2, "I", 1), 4) == Message(3, 2, 1) == message_out(Action(3, "B", 1), 4)
    assert message_out(Action(2, "F", 1), 4) == Message(2, 3, 1) == message_in(Action(3, "F", 1), 4)
    assert message_out(Action(3, "F", 1), 4) is None
    assert message_out(Action(0, "B", 1), 4) is None
    assert message_out(Action(1, "W", 1), 4) is None
    assert str(Message(3, 2, 1)) == "gradient 1 of stage 3 for stage 2"


def test_transfers_written_out() -> None:
    plan = [" ".join(map(str, steps)) for steps in add_transfers(one_f_one_b(2, 2))]
    assert plan == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_broken_transfers_are_found() -> None:
    good = add_transfers(one_f_one_b(2, 2))
    assert check_transfers(good) == []
    swapped = [list(steps) for steps in good]
    swapped[1][0], swapped[1][2] = swapped[1][2], swapped[1][0]
    faults = check_transfers(swapped)
    assert "rank 1: 1F0 runs before the activation 0 of stage 0 for stage 1 is received" in faults
    assert any(fault.startswith("rank 0 to rank 1: sends and receives differ") for fault in faults)
    lost = [good[0], [step for step in good[1] if not isinstance(step, Transfer) or step.sends]]
    assert any("2 sent, 0 received" in fault for fault in check_transfers(lost))
    early = [list(steps) for steps in good]
    early[0][0], early[0][1] = early[0][1], early[0][0]
    assert "rank 0: 0SEND_F0 before the activation 0 of stage 0 for stage 1 is made" in check_transfers(early)


def test_blocking_sends_that_cross_are_found() -> None:
    # Same order per direction, yet each rank sends first: fine with buffers, stuck without.
    crossing = [
        [Action(0, "F", 0), Transfer(Message(0, 1, 0), 1, True)],
        [Transfer(Message(0, 1, 0), 0, False), Action(1, "F", 0), Action(1, "B", 0)],
    ]
    a, b = Message(0, 1, 1), Message(1, 0, 0)
    crossing[0] += [Action(0, "F", 1), Transfer(a, 1, True), Transfer(b, 1, False)]
    crossing[1] += [Transfer(b, 0, True), Transfer(a, 0, False)]
    assert check_transfers(crossing) == ["rank 0: blocked at 0SEND_F1", "rank 1: blocked at 1SEND_B0"]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble"])
def test_sends_follow_their_action(name: str) -> None:
    schedule = build_schedule(name, 4, 1, 6)
    for actions, steps in zip(schedule, add_transfers(schedule), strict=True):
        assert [s for s in steps if isinstance(s, Action)] == actions
        for at, step in enumerate(steps):
            if isinstance(step, Transfer) and step.sends:
                last = [s for s in steps[:at] if isinstance(s, Action)][-1]
                assert message_out(last, 4) == step.message


def test_actions_are_written_as_they_are_read() -> None:
    assert parse_schedule("0F0,,0B0\n") == [[Action(0, "F", 0), Action(0, "B", 0)]]
    assert str(parse_action(" 12I7 ")) == "12I7"


def test_zero_bubble_interleaved_on_two_ranks_receives_early() -> None:
    report = check_schedule(zero_bubble(2, 4, vpp=2))
    assert report.faults == ()
    assert not report.in_order

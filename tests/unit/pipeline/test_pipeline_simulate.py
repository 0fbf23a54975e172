"""The simulator computes what the papers compute, and the pictures show it."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_megatron.pipeline.draw import draw_png, draw_text
from lightning_megatron.pipeline.schedule import build_schedule, forward_only, gpipe, one_f_one_b, zero_bubble
from lightning_megatron.pipeline.simulate import Costs, DeadlockError, ideal_bubble, simulate

times = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 16), times, times)
def test_bubble_without_chunks(name: str, pp: int, m: int, forward: float, backward: float) -> None:
    # Any number of micro-batches, any ratio of backward to forward.
    simulation = simulate(build_schedule(name, pp, 1, m), Costs(forward, backward))
    assert simulation.bubble == pytest.approx((pp - 1) / m)
    assert simulation.step_time == pytest.approx((m + pp - 1) * (forward + backward))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 12), times)
def test_bubble_interleaved(pp: int, vpp: int, more: int, backward: float) -> None:
    # Also where pp does not divide the number of micro-batches.
    m = pp + more
    assume(backward >= 1)
    simulation = simulate(build_schedule("interleaved", pp, vpp, m), Costs(1.0, backward))
    assert simulation.bubble == pytest.approx((pp - 1) / (m * vpp))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 12), times, times, times)
def test_bubble_zero_bubble(pp: int, vpp: int, more: int, f: float, i: float, w: float) -> None:
    m = pp + more
    costs = Costs(f, i + w, i, w)
    simulation = simulate(zero_bubble(pp, m, vpp), costs)
    rival = simulate(build_schedule(None, pp, vpp, m), costs)
    ideal = ideal_bubble("zero-bubble", pp, vpp, m, costs)
    assert (ideal is None) == (w > min(f, i))
    if ideal is not None:
        assert simulation.bubble == pytest.approx(ideal)
        assert ideal == pytest.approx((pp - 1) * (f + i - w) / (m * vpp * (f + i + w)))
        assert simulation.bubble < rival.bubble


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_micro_batches_than_ranks(m: int) -> None:
    bubbles = {n: simulate(build_schedule(n, 4, 1, m)).bubble for n in ("1f1b", "zero-bubble")}
    assert bubbles["zero-bubble"] < bubbles["1f1b"]
    assert ideal_bubble("interleaved", 4, 2, m) is None
    assert simulate(build_schedule("interleaved", 4, 2, m)).bubble <= bubbles["1f1b"]


def test_costs_per_stage_and_messages() -> None:
    assert simulate(one_f_one_b(2, 1), Costs(communication=0.5)).step_time == 7.0
    slow_end = simulate(one_f_one_b(2, 4), Costs(forward=(1.0, 2.0), backward=(2.0, 4.0)))
    assert slow_end.step_time == 1 + 4 * 6 + 2
    assert slow_end.idle == (15.0, 3.0)
    assert slow_end.bubble == pytest.approx(18 / 36)
    assert Costs(backward=3.0, input_gradient=1.0).of("W", 0) == 2.0
    assert Costs(backward=(2.0, 4.0)).of("I", 1) == Costs(backward=(2.0, 4.0)).of("W", 1) == 2.0


def test_timeline_is_consistent() -> None:
    simulation = simulate(zero_bubble(4, 8, 2), Costs(communication=0.25))
    for row, busy, idle in zip(simulation.timeline, simulation.busy, simulation.idle, strict=True):
        assert all(a.end <= b.start for a, b in pairwise(row))
        assert sum(slot.end - slot.start for slot in row) == pytest.approx(busy)
        assert busy + idle == pytest.approx(simulation.step_time)


def test_peaks() -> None:
    assert simulate(gpipe(4, 8)).peak_activations == (8, 8, 8, 8)
    assert simulate(one_f_one_b(4, 8)).peak_activations == (4, 3, 2, 1)
    assert simulate(zero_bubble(4, 8)).peak_activations == (4, 4, 4, 4)
    assert simulate(build_schedule("interleaved", 4, 2, 8)).peak_activations == (11, 9, 7, 5)
    assert simulate(forward_only(4, 2, 8)).peak_activations == (0, 0, 0, 0)


def test_deadlock_says_who_waits() -> None:
    schedule = one_f_one_b(2, 2)
    schedule[0][1], schedule[0][2] = schedule[0][2], schedule[0][1]
    schedule[1] = [schedule[1][i] for i in (0, 2, 1, 3)]
    with pytest.raises(DeadlockError) as error:
        simulate(schedule)
    assert error.value.waits[1].endswith("which rank 0 sends after 0F1")
    with pytest.raises(DeadlockError, match="which rank 1 never sends"):
        simulate([schedule[0], schedule[1][:1]])


def test_empty() -> None:
    nothing = simulate([[], []])
    assert (nothing.step_time, nothing.bubble, draw_text(nothing)) == (0.0, 0.0, "")


def test_text() -> None:
    assert draw_text(simulate(one_f_one_b(2, 2)), 80).splitlines() == [
        "rank 0 |F0-|F1-        |B0-----    |B1-----|",
        "rank 1     |F0-|B0-----|F1-|B1-----|",
    ]
    assert draw_text(simulate(one_f_one_b(2, 2)), 40).splitlines()[1] == "rank 1    |F0|B0---|F1|B1---|"
    assert draw_text(simulate(one_f_one_b(2, 2)), 9).splitlines()[1] == "rank 1   |F|B--|F|B--|"
    several = draw_text(simulate(build_schedule("interleaved", 2, 2, 2)), 200)
    assert several.startswith("rank 0 |0F0-|0F1-|2F0-")
    narrow = draw_text(simulate(build_schedule("interleaved", 4, 2, 8)), 60).splitlines()
    assert len({line.index("|") for line in narrow}) == 4
    assert len(narrow[0]) == len("rank 0 ") + 2 * 57 + 1


def test_png(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "zero.picture"
    draw_png(simulate(zero_bubble(2, 3)), path, "two ranks")
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]' in a clone"):
        draw_png(simulate(zero_bubble(2, 3)), path)

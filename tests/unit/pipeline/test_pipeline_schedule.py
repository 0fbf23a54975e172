"""Schedules: their content, the arguments that they refuse, and agreement with torch's own schedules."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.action import Schedule, format_schedule
from lightning_megatron.pipeline.schedule import (
    SCHEDULE_NAMES,
    SCHEDULES,
    PipelineSchedule,
    build_schedule,
    forward_only,
    gpipe,
    group_sizes,
    interleaved,
    one_f_one_b,
    schedule_kind,
    schedule_problems,
    zero_bubble,
)
from lightning_megatron.pipeline.send_recv import add_transfers
from lightning_megatron.pipeline.simulate import ideal_bubble, peak_activations
from lightning_megatron.pipeline.validate import check_schedule
from tests.schedules import parse_action, parse_schedule


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule]


def possible_vpp(name: str | None, pp: int, vpp: int) -> int:
    """The nearest ``vpp`` that a schedule takes."""
    if pp == 1 or name in ("gpipe", "1f1b"):
        return 1
    return max(vpp, 2) if name == "interleaved" else vpp


wishes = st.tuples(
    st.sampled_from([None, *SCHEDULE_NAMES]), st.integers(1, 6), st.integers(1, 4), st.integers(1, 14)
).map(lambda wish: (wish[0], wish[1], possible_vpp(*wish[:3]), wish[3]))


def test_schedules_written_out() -> None:
    assert text(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert text(interleaved(2, 2, 2)) == ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
    # The last rank keeps one W in hand; stage 0, with no one above it, keeps the backward whole.
    assert text(zero_bubble(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]
    assert text(forward_only(2, 2, 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]


@pytest.mark.parametrize("name", [None, *SCHEDULE_NAMES])
def test_one_stage_alternates(name: str | None) -> None:
    assert text(build_schedule(name, 1, 1, 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2"]


def test_the_annotation_has_the_name_of_every_schedule() -> None:
    assert list(get_args(PipelineSchedule)) == list(SCHEDULE_NAMES)


def test_what_follows_from_a_name_follows_from_the_schedule() -> None:
    """The fields that others ask in place of the name say what the actions do."""
    for kind in SCHEDULES:
        schedule = build_schedule(kind.name, 3, max(kind.chunks[0], 1), 7)
        assert kind.splits_backward == any(action.kind == "W" for actions in schedule for action in actions)
        assert kind.alternates == (peak_activations(schedule)[-1] < 7)


def test_an_unknown_name_has_no_schedule_and_no_bubble() -> None:
    for ask in (lambda: schedule_kind("dualpipe", 1), lambda: ideal_bubble("dualpipe", 4, 1, 8)):
        with pytest.raises(ConfigError, match="pipeline_schedule='dualpipe': no such schedule"):
            ask()


def test_defaults() -> None:
    assert build_schedule(None, 4, 1, 8) == one_f_one_b(4, 8)
    assert build_schedule(None, 4, 2, 8) == interleaved(4, 2, 8)


@pytest.mark.parametrize(
    ("wish", "fragment"),
    [
        (("1f1v", 2, 1, 4), "no such schedule; nearest valid: 1f1b"),
        (("1f1b", 0, 1, 4), "pp=0: a size must be at least 1"),
        (("1f1b", 2, 1, 0), "num_microbatches=0: a size must be at least 1"),
        ((None, 1, 2, 4), "vpp=2: interleaved chunks need a pipeline"),
        (("1f1b", 2, 2, 4), "pipeline_schedule='1f1b': this schedule runs one chunk a rank"),
        (("gpipe", 2, 2, 4), "nearest valid: interleaved, zero-bubble"),
        (("interleaved", 2, 1, 4), "vpp=1: there is nothing to interleave"),
        (("interleaved", 4, 2, 8, 3), "microbatch_group_size=3: a group needs at least pp=4"),
        (("1f1b", 4, 1, 8, 4), "microbatch_group_size=4: micro-batches are grouped to alternate between chunks"),
    ],
)
def test_every_rule_has_its_own_text(wish: tuple[Any, ...], fragment: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_schedule(*wish)
    assert fragment in str(error.value)


@settings(deadline=None, max_examples=150)
@given(wishes)
def test_every_schedule_is_proven(wish: tuple[str | None, int, int, int]) -> None:
    name, pp, vpp, m = wish
    schedule = build_schedule(*wish)
    report = check_schedule(schedule)
    assert report.faults == ()
    assert parse_schedule(format_schedule(schedule)) == schedule
    # Bounded: never more than the warm-up of rank 0 and one; 1F1B holds exactly min(m, pp - r).
    sizes = group_sizes(pp, m)
    bound = (vpp - 1) * sizes[0] + 2 * (pp - 1) + 1 if vpp > 1 else m if name == "gpipe" else pp
    assert max(report.peak_activations) <= min(m * vpp, bound)
    if name in (None, "1f1b") and vpp == 1:
        assert report.peak_activations == tuple(min(m, pp - r) for r in range(pp))
    if vpp == 1:
        assert report.in_order
        assert report.rendezvous_safe


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 14), st.integers(0, 6))
def test_any_group_size_is_proven(pp: int, vpp: int, m: int, more: int) -> None:
    sizes = group_sizes(pp, m, pp + more)
    assert sum(sizes) == m
    assert min(sizes) >= min(m, pp)
    assert max(sizes) - min(sizes) <= 1
    for schedule in (interleaved(pp, vpp, m, pp + more), zero_bubble(pp, m, vpp, pp + more)):
        assert check_schedule(schedule).faults == ()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 14))
def test_forward_only_is_proven(pp: int, vpp: int, m: int) -> None:
    schedule = forward_only(pp, vpp if pp > 1 else 1, m)
    assert check_schedule(schedule, forward_only=True).faults == ()


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vpp", [1, 2])
def test_zero_bubble_needs_no_more_memory(pp: int, vpp: int) -> None:
    for m in (4, 6, 8, 16):
        rival = one_f_one_b(pp, m) if vpp == 1 else interleaved(pp, vpp, m)
        mine = check_schedule(zero_bubble(pp, m, vpp)).peak_activations
        assert max(mine) <= max(check_schedule(rival).peak_activations)


def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_rank_actions(class_name: str, pp: int, vpp: int, m: int) -> Schedule:
    """The compute actions of torch's schedule; its tables need a few attributes only, and no process group."""
    torch_class = getattr(torch_schedules(), class_name)
    if not hasattr(torch_class, "_calculate_single_rank_operations" if vpp > 1 else "_get_pipeline_order"):
        pytest.skip(f"this torch does not give out the table of {class_name} without processes")
    table = object.__new__(torch_class)
    table._n_microbatches, table._num_stages = m, pp * vpp
    table.pp_group_size, table.n_local_stages = pp, vpp
    table.number_of_rounds = max(1, m // pp)
    table.microbatches_per_round = m // table.number_of_rounds
    if vpp > 1:
        rows = [table._calculate_single_rank_operations(rank) for rank in range(pp)]
    else:
        rows = [row for _, row in sorted(table._get_pipeline_order().items())]
    return [[parse_action(str(a)) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]


def halves(schedule: Schedule) -> Schedule:
    """Every ``B`` as ``I`` and ``W``."""
    return [
        [half for a in actions for half in ([a._replace(kind="I"), a._replace(kind="W")] if a.kind == "B" else [a])]
        for actions in schedule
    ]


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 5), (3, 4), (4, 8), (8, 16)])
def test_1f1b_equals_torch(pp: int, m: int) -> None:
    # Without the last rank: torch 2.13 numbers its forwards there from 1 (in this table; its run starts at 0).
    assert one_f_one_b(pp, m)[:-1] == torch_rank_actions("Schedule1F1B", pp, 1, m)[:-1]


@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 4), (3, 9), (4, 8), (4, 10), (4, 3), (4, 7), (8, 16)])
def test_interleaved_equals_torch(pp: int, vpp: int, m: int) -> None:
    assert interleaved(pp, vpp, m) == torch_rank_actions("ScheduleInterleaved1F1B", pp, vpp, m)
    assert halves(zero_bubble(pp, m, vpp)) == torch_rank_actions("ScheduleInterleavedZeroBubble", pp, vpp, m)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(("pp", "m"), [(2, 3), (2, 4), (4, 6), (4, 9)])
def test_torch_accepts_schedule_and_transfers(name: str, pp: int, m: int) -> None:
    torch = torch_schedules()
    for function in ("_validate_schedule", "_simulate_comms_compute"):
        if not hasattr(torch, function):
            pytest.skip(f"this torch has no {function}")
    for vpp in (1, 2):
        if schedule_problems(name, pp, vpp, m):
            continue
        schedule = build_schedule(name, pp, vpp, m)

        def parsed(rows: Any) -> dict[int, Any]:
            return {rank: [torch._Action.from_str(str(step)) for step in row] for rank, row in enumerate(rows)}

        torch._validate_schedule(parsed(schedule), pp, pp * vpp, m)
        ranks = pp
        torch._simulate_comms_compute(parsed(add_transfers(schedule)), lambda s, ranks=ranks: s % ranks, pp * vpp)

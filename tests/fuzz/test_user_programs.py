"""Random ordinary programs against stock Lightning: see ``user_programs.py``, which also runs alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from user_batches import MICRO_BATCH
from user_comparison import Difference, beyond_rounding, differences
from user_grammar import CHOICES, EXTRAS, KNOWN, LAYOUTS, SENSELESS, Program, broken, drawn
from user_programs import Answer, answer_of, described, shrunk
from user_runs import Outcome, run

pytestmark = pytest.mark.filterwarnings("ignore")
IN_THE_GATE, ALL = 40, 400
ON_RANKS = dict(zip(range(0, IN_THE_GATE, 4), ("dp2", "tp2", "dp2", "pp2", "mb2") * 2, strict=True))
"""Layouts of some seeds; the others run in one process, which costs least."""


def program_of(seed: int) -> Program:
    return drawn(seed, ON_RANKS.get(seed, "one"))


@pytest.mark.parametrize("seed", range(IN_THE_GATE))
def test_a_program_does_what_it_does_under_stock_lightning(
    ranks: Callable[..., list[Any]], tmp_path: Path, seed: int
) -> None:
    answer = answer_of(program_of(seed), tmp_path, ranks)
    assert answer.kind in ("equal", "refused"), described(program_of(seed), answer)


@pytest.mark.exhaustive
def test_so_do_many_more(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    def attempt(program: Program) -> Answer:
        return answer_of(program, tmp_path, ranks)

    answers = {program: attempt(program) for program in map(drawn, range(IN_THE_GATE, ALL))}
    faults = [described(*shrunk(each, answer, attempt)) for each, answer in answers.items() if answer.kind == "fault"]
    assert not faults, "\n".join(faults)


def test_a_program_is_what_its_text_says() -> None:
    for seed in range(50):
        program = drawn(seed)
        assert Program.parse(str(program)) == program == drawn(seed)
        assert not list(broken(program, (*SENSELESS, *KNOWN)))


def test_every_feature_is_drawn_in_some_program_and_every_rule_names_features() -> None:
    seen = {word for seed in range(1000) for word in drawn(seed, known=True).words}
    values = {f"{name}={value}" for name, chosen in CHOICES.items() for value in chosen[1:]}
    assert seen >= values | set(EXTRAS) | {f"@={layout}" for layout in LAYOUTS}
    named = {word for rule in (*SENSELESS, *KNOWN) for word in (*rule.words, *rule.unless)}
    assert named <= seen


def test_a_failing_program_loses_what_it_does_not_need() -> None:
    def attempt(program: Program) -> Answer:
        fails = {"net=conv", "teacher"} <= program.words
        return Answer("fault", [Difference("weights", "", 1, 2)]) if fails else Answer("equal")

    program = Program.parse("net=conv batch=dict log=step val teacher counter cb-early seed=3 @tp2")
    found, answer = shrunk(program, attempt(program), attempt)
    assert (str(found), answer.kind) == ("net=conv teacher seed=3 @tp2", "fault")


DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "losses": ({"a": 1.0}, {"a": 1.0001}),
    "samples": ({"a": [1, 2]}, {"a": [2, 1]}),
    "loss dtypes": ({"a": "torch.float32"}, {"a": "torch.bfloat16"}),
    "checkpoint": ({"w": torch.zeros(2)}, {"w": torch.zeros(3)}),
    "logged": ({"a": 1.0}, {}),
    "callbacks": ({"a": "Best score: 2.998."}, {"a": "Best score: 2.900."}),
}


@pytest.mark.parametrize("subject", DIFFERENCES)
def test_what_differs_is_found(subject: str) -> None:
    stock, ours = ({subject: record, "steps": 1} for record in DIFFERENCES[subject])
    assert {each.subject for each in differences(Program(), [Outcome(stock)], [Outcome(ours)])} == {subject}
    assert not differences(Program(), [Outcome(stock)], [Outcome(stock)])


def test_a_difference_is_rounding_if_stock_lightning_differs_as_much_with_weights_moved_in_their_last_places() -> None:
    def found(ours: float, moved: float) -> list[Difference]:
        stock, other, ends = ([Outcome({"losses": {"a": value}, "steps": 1})] for value in (1.0, moved, ours))
        return beyond_rounding(program, differences(program, stock, ends), stock, other)

    program = Program(layout="mb2")
    assert not found(ours=1.0005, moved=1.0002)
    assert found(ours=1.0005, moved=1.0001)
    assert found(ours=1.1, moved=1.5)


PARTS = "optimizer=momentum precision=bf16-mixed two-calls seed=3 @mb2"


def trained(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights in fp32 at the end, and the optimizer's state."""
    found = record["checkpoint"]
    main = {name: value for name, value in found["state_dict"].items() if name.startswith("main ")}
    state = {f"{name} state": each["momentum_buffer"] for name, each in found["optimizers"][0].items()}
    return main | state


def test_gradients_of_micro_batches_round_in_bf16_as_those_of_batches_that_stock_lightning_accumulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.parse(PARTS)
    ours = trained(run(program, tmp_path / "ours", ours=True).record)
    whole = trained(run(program.at("one"), tmp_path / "whole").record)
    halves = trained(run(program.at("one"), tmp_path / "halves", halves=True).record)
    monkeypatch.setattr("user_batches.BATCH", MICRO_BATCH)
    accumulated = trained(run(program.at("one").always(accumulate="2"), tmp_path / "accumulated").record)
    assert len(ours) == 8
    for name, value in ours.items():
        assert torch.equal(value, accumulated[name]), name
        assert torch.equal(value, halves[name]), name
    assert any(not torch.equal(value, whole[name]) for name, value in ours.items())


@pytest.mark.slow
def test_a_program_in_bf16_is_held_against_stock_lightning_with_a_backward_of_each_micro_batch(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    program = Program.parse("net=t5 odd cb-unfreeze seed=4100740 " + PARTS.replace(" seed=3", ""))
    answer = answer_of(program, tmp_path, ranks)
    assert answer.kind == "equal", described(program, answer)


def test_weights_are_moved_by_one_unit_in_the_last_place(tmp_path: Path) -> None:
    program = Program.parse("optimizer=momentum seed=3")
    first, moved = (run(program, tmp_path / str(seed), moved=seed).record for seed in (None, 1))
    for name, weight in first["weights in memory"].items():
        steps = first["steps"]
        assert 0 < (moved["weights in memory"][name] - weight).abs().max() < 4 * steps * 2**-23


def test_an_error_behind_the_first_step_is_a_fault_and_a_refusal_before_it_is_none() -> None:
    for kind, count in (("refused", 0), ("refused late", 1), ("failed", 1)):
        ended = Outcome({"steps": 0}, (kind, "KeyError: x", "file.py:1"))
        assert len(differences(Program(), [Outcome({})], [ended])) == count

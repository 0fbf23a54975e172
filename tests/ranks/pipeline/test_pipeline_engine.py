"""The engine without Lightning: every schedule against plain autograd, bit for bit, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_pipeline import CPU, Case, Outcome, ToyWork, engine, evaluate, gradients_of, plain, train

from lightning_megatron.mesh import Axis
from lightning_megatron.pipeline.runtime import _MOST_SENDING, PipelineRuntime, _starts_at_edges, training_plan
from lightning_megatron.pipeline.validate import check_schedule
from lightning_megatron.weight_grad_store import WeightGradStore

Ranks = Callable[..., list[Any]]

# Also fewer micro-batches than ranks, and numbers that pp does not divide.
CASES = [
    *(Case(name, 2, 1, m) for name in ("gpipe", "1f1b", "zero-bubble") for m in (1, 4)),
    *(Case(name, 2, 2, m) for name in ("interleaved", "zero-bubble") for m in (2, 5)),
    *(Case(name, 4, 1, m) for name in ("gpipe", "1f1b", "zero-bubble") for m in (3, 8)),
    *(Case(name, 4, 2, m) for name in ("interleaved", "zero-bubble") for m in (3, 4, 6, 8)),
    Case("interleaved", 3, 3, 7),
]


@pytest.fixture(scope="module")
def _outcomes() -> dict[Case, list[Outcome]]:
    return {}


@pytest.fixture(params=CASES, ids=lambda c: f"{c.name}-pp{c.pp}-vpp{c.vpp}-m{c.micro_batches}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def outcome(case: Case, ranks: Ranks, _outcomes: dict[Case, list[Outcome]]) -> list[Outcome]:
    """State of every rank after one step; all cases of a size run in one call."""
    if case not in _outcomes:
        together = [c for c in CASES if c.pp == case.pp]
        for c, found in zip(together, zip(*ranks(case.pp, train, together), strict=True), strict=True):
            _outcomes[c] = list(found)
    return _outcomes[case]


def test_losses_and_gradients_are_those_of_plain_autograd_bit_for_bit(case: Case, outcome: list[Outcome]) -> None:
    # Every stage goes through its backwards in the order of micro-batches, so that no sum changes its order.
    losses, gradients = plain(case)
    mine = {stage: found for rank in outcome for stage, found in rank.gradients.items()}
    assert mine.keys() == gradients.keys()
    assert_equal(outcome[-1].losses, losses)
    for stage, expected in gradients.items():
        assert_equal(mine[stage], expected)


def test_activations_live_as_long_as_the_schedule_says(case: Case, outcome: list[Outcome]) -> None:
    report = check_schedule(case.schedule)
    assert report.faults == ()
    assert [rank.most_entered for rank in outcome] == list(report.peak_activations)
    assert [rank.entered_in_the_end for rank in outcome] == [0] * case.pp


@pytest.mark.skipif(not _starts_at_edges(), reason="this torch needs the output to begin a backward")
def test_what_was_sent_is_free(case: Case, outcome: list[Outcome]) -> None:
    # But for the last transfers, which may be on their way.
    for rank in outcome:
        assert rank.left_at_last_backwards[-1] <= _MOST_SENDING


def test_evaluation_keeps_no_more_than_what_arrives(ranks: Ranks) -> None:
    case = Case("interleaved", 4, 2, 6)
    found = ranks(4, evaluate, case)
    assert_equal(found[-1][0], plain(case)[0])
    assert max(most for _, most in found) == 1


def test_one_rank_is_plain_accumulation() -> None:
    case = Case("1f1b", 1, 1, 5)
    (found,) = train([case])
    losses, gradients = plain(case)
    assert_equal(found.losses, losses)
    assert_equal(found.gradients[0], gradients[0])
    assert found.most_entered == 1


def test_the_last_backward_of_each_stage_is_bracketed(case: Case, outcome: list[Outcome]) -> None:
    for rank, found in enumerate(outcome):
        kinds = {(a.stage, a.kind) for a in case.schedule[rank] if a.kind != "F"}
        assert len(found.left_at_last_backwards) == len(kinds)


def test_an_error_names_its_place() -> None:
    case = Case("1f1b", 1, 1, 3)
    _, runtime, work = engine(case)

    def fails(stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        if microbatch == 2:
            raise ValueError("no luck")
        return ToyWork.forward(work, stage, microbatch, hidden)

    work.forward = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no luck") as caught:
        runtime.run(training_plan("1f1b", 1, 1, 3, 0), work)
    said = [*caught.value.args, *getattr(caught.value, "__notes__", ())]
    assert any("pipeline rank 0 of 1, at 0F2" in line for line in said)


class NothingToLearn(ToyWork):
    """A step that returns no loss for some micro-batches: a user may skip them."""

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        out = super().forward(stage, microbatch, hidden)
        return None if stage == self.case.num_stages - 1 and microbatch == 1 else out


def skip_one(case: Case) -> dict[int, list[Tensor]]:
    mesh, runtime, work = engine(case)
    work = NothingToLearn(case, work.layers)
    runtime.run(training_plan(case.name, case.pp, case.vpp, case.micro_batches, mesh.pp.rank), work)
    return {stage: [p.grad for p in module.parameters() if p.grad is not None] for stage, module in work.layers.items()}


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_micro_batch_without_a_loss_adds_nothing(ranks: Ranks, name: str) -> None:
    found = ranks(2, skip_one, Case(name, 2, 1, 3))
    for stage, gradients in {stage: g for rank in found for stage, g in rank.items()}.items():
        for mine, whole in zip(gradients, plain(Case(name, 2, 1, 3))[1][stage], strict=True):
            assert not torch.equal(mine, whole)
            assert torch.isfinite(mine).all()


def test_the_engine_needs_no_process_group() -> None:
    """Losses and gradients on an axis without a group, held against plain autograd."""
    case = Case("1f1b", 1, 1, 3)
    _, _, work = engine(case)
    runtime = PipelineRuntime(Axis("pp"), 1, CPU, torch.float32, WeightGradStore())
    runtime.run(training_plan(case.name, 1, 1, case.micro_batches, 0), work)
    losses, gradients = plain(case)
    assert_equal(work.losses, losses)
    assert_equal(gradients_of(work.layers)[0], gradients[0])


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), (mine, theirs)

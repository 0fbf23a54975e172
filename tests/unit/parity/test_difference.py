"""The first number that differs is where a fault is, whatever follows from it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_megatron.tools.parity.difference import Difference, Output, Step, first_difference, not_compared

STEP = Step(
    loss=6.0,
    grad_norm=2.0,
    outputs={
        "embedding": Output(1.0, 0.01, 1),
        "layers.0": Output(2.0, -1.0, 1),
        "layers.1": Output(3.0, 2.0, 1),
    },
    gradients={
        "model.embedding.word.weight": 1.0,
        "model.layers.0.mlp.fc1.weight": 1.2,
        "model.layers.1.mlp.fc1.weight": 1.1,
        "model.layers.10.mlp.fc1.weight": 1e-9,
        "model.head.weight": 0.7,
    },
)


def changed(step: Step, **numbers: float) -> Step:
    """The step with some numbers of mappings changed, by ``kind_name``."""
    return replace(
        step,
        outputs={name: replace(output, rms=numbers.get(name, output.rms)) for name, output in step.outputs.items()},
        gradients={name: numbers.get(name, value) for name, value in step.gradients.items()},
    )


def test_what_is_rounding_is_no_difference() -> None:
    other = replace(changed(STEP, **{"layers.1": 3.0 * (1 + 1e-6)}), loss=6.0 * (1 - 1e-6))
    assert first_difference([STEP, STEP], [other, STEP], 1e-5) is None


def test_a_gradient_that_is_0_by_arithmetic_may_have_any_rounding() -> None:
    other = changed(STEP, **{"model.layers.10.mlp.fc1.weight": 3e-8})
    assert first_difference([STEP], [other], 1e-4) is None


def test_the_forward_comes_first_and_from_its_beginning() -> None:
    after = {"layers.0": 2.1, "layers.1": 3.3, "model.head.weight": 0.9}
    found = first_difference([STEP, STEP], [STEP, changed(STEP, **after)], 1e-4)
    assert found == Difference(1, "output", "layers.0", 2.0, 2.1, "root mean square")
    assert str(found) == "step 1: the forward of layers.0: its output is 2 and 2.1 (root mean square)"


def test_an_output_that_turned_differs_although_it_is_as_long() -> None:
    other = replace(STEP, outputs=STEP.outputs | {"embedding": Output(1.0, 0.011, 1)})
    found = first_difference([STEP], [other], 1e-4)
    assert found == Difference(0, "output", "embedding", 0.01, 0.011, "sum with random signs")
    nearly = replace(STEP, outputs=STEP.outputs | {"embedding": Output(1.0, 0.01001, 1)})
    assert first_difference([STEP], [nearly], 1e-4) is None, "a sum that is small by chance is held against the size"


def test_the_backward_is_looked_at_from_its_end() -> None:
    after = {"model.embedding.word.weight": 2.0, "model.layers.0.mlp.fc1.weight": 2.0}
    found = first_difference([STEP], [changed(STEP, **after)], 1e-4)
    assert found == Difference(0, "gradient", "model.layers.0.mlp.fc1.weight", 1.2, 2.0)


@pytest.mark.parametrize(("name", "kind"), [("loss", "loss"), ("grad_norm", "grad_norm")])
def test_a_whole_number_alone(name: str, kind: str) -> None:
    found = first_difference([STEP], [replace(STEP, **{name: 7.0})], 1e-4)
    assert found is not None
    assert (found.kind, found.second) == (kind, 7.0)


def test_nan_and_what_is_not_there_differ() -> None:
    assert first_difference([STEP], [replace(STEP, loss=math.nan)], 1e-4) is not None
    missing = replace(STEP, gradients={k: v for k, v in STEP.gradients.items() if "head" not in k})
    found = first_difference([STEP], [missing], 1e-4)
    assert found is not None
    assert found.name == "model.head.weight"


ONE = Output(2.0, 0.5, count=64, tp=1, signs="8 on 1")


@pytest.mark.parametrize(
    ("other", "count"),
    [
        pytest.param(Output(2.0, 0.5, count=128, tp=2), 64, id="whole"),
        pytest.param(Output(2.0, 0.5, count=64, tp=2, spread=1.0), 64, id="shards"),
        pytest.param(Output(2.0, 0.5, count=128, tp=2, spread=1.0), 0, id="parts-of-a-sum"),
        pytest.param(Output(2.0, 0.5, count=96, tp=2), 0, id="another-size"),
    ],
)
def test_outputs_of_one_size_over_all_ranks_are_compared(other: Output, count: int) -> None:
    assert ONE.shared_count(other, 1e-4) == other.shared_count(ONE, 1e-4) == count
    wrong = replace(STEP, outputs={"fc": replace(other, rms=2.2)})
    right = replace(STEP, outputs={"fc": ONE})
    found = first_difference([wrong], [right], 1e-4)
    assert (found is None) == (count == 0)
    assert not_compared(wrong, right, 1e-4) == ([] if count else ["fc"])


def test_sums_with_other_signs_are_not_compared() -> None:
    right, wrong = (replace(STEP, outputs={"fc": replace(ONE, signed=signed)}) for signed in (0.5, 0.6))
    other = replace(STEP, outputs={"fc": replace(ONE, signed=0.6, signs="4 on 1")})
    assert first_difference([right], [wrong], 1e-4) is not None
    assert first_difference([right], [other], 1e-4) is None


def test_a_layer_of_one_layout_alone_is_not_compared() -> None:
    other = replace(STEP, outputs={name: output for name, output in STEP.outputs.items() if name != "layers.0"})
    assert first_difference([STEP], [other], 1e-4) is None
    assert not_compared(STEP, other, 1e-4) == not_compared(other, STEP, 1e-4) == ["layers.0"]


def test_values_without_an_end_agree_with_themselves() -> None:
    mask = replace(STEP, outputs={"mask": Output(math.inf, math.nan, 4)})
    assert first_difference([mask], [mask], 1e-4) is None
    assert first_difference([mask], [replace(STEP, outputs={"mask": Output(1.0, 0.0, 4)})], 1e-4) is not None

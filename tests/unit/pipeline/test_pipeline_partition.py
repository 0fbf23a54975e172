"""Layers over stages: who gets how many, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.presets import preset
from lightning_megatron.pipeline.partition import LayerSplit, parse_layout
from lightning_megatron.stage import StageLayers


def partition(*args: int, loss_cost: float = 1.0, **split: Any) -> tuple[StageLayers, ...]:
    return LayerSplit(**split).stages(*args, loss_cost=loss_cost)


def sizes(*args: Any, **kwargs: Any) -> list[int]:
    return [len(stage.layers) for stage in partition(*args, **kwargs)]


def test_stages_written_out() -> None:
    assert partition(4, 2, 2) == (
        StageLayers(0, 0, 0, range(0, 1), True, False),
        StageLayers(1, 1, 0, range(1, 2), False, False),
        StageLayers(2, 0, 1, range(2, 3), False, False),
        StageLayers(3, 1, 1, range(3, 4), False, True),
    )
    assert partition(3, 1) == (StageLayers(0, 0, 0, range(3), True, True),)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_even_covers_every_layer_once(pp: int, vpp: int, each: int) -> None:
    stages = partition(pp * vpp * each, pp, vpp)
    assert [n for stage in stages for n in stage.layers] == list(range(pp * vpp * each))
    assert {len(stage.layers) for stage in stages} == {each}
    assert [stage.rank for stage in stages] == [n % pp for n in range(pp * vpp)]
    assert [stage.chunk for stage in stages] == [n // pp for n in range(pp * vpp)]
    assert [s.stage for s in stages if s.has_embedding] == [0]
    assert [s.stage for s in stages if s.has_loss] == [pp * vpp - 1]


def test_uneven() -> None:
    assert sizes(10, 4, first_stage_layers=1, last_stage_layers=1) == [1, 4, 4, 1]
    assert sizes(11, 4, first_stage_layers=2) == [2, 3, 3, 3]
    assert sizes(7, 2, 2, last_stage_layers=1) == [2, 2, 2, 1]
    assert sizes(5, 2, first_stage_layers=2, last_stage_layers=3) == [2, 3]
    assert sizes(3, 4, first_stage_layers=0) == [0, 1, 1, 1]


def test_embedding_and_loss_count_as_layers() -> None:
    assert sizes(10, 4, count_embedding=True, count_loss=True) == [2, 3, 3, 2]
    assert sizes(7, 2, 2, count_loss=True) == [2, 2, 2, 1]
    assert sizes(7, 4, count_embedding=True) == [1, 2, 2, 2]


def test_balanced_counts_the_output_layer_by_its_work() -> None:
    """No other share of the layers has less work in the stage that has most of it."""
    assert preset("llama-tiny").loss_cost == pytest.approx(50 / 9)
    assert sizes(8, 2, layout="balanced", loss_cost=5.57) == [7, 1]
    assert sizes(8, 2, layout="balanced", loss_cost=0.0) == [4, 4]
    assert sizes(8, 2, layout="balanced", loss_cost=9.0) == [8, 0]
    assert sizes(32, 4, layout="balanced", loss_cost=2.4) == [8, 9, 9, 6]
    assert sizes(7, 2, 2, layout="balanced", loss_cost=1.0) == [2, 2, 2, 1]
    assert sizes(3, 1, layout="balanced") == [3]
    with pytest.raises(ConfigError, match="num_layers=2: fewer layers than the 3 stages before the last"):
        sizes(2, 4, layout="balanced")


def test_layout_string() -> None:
    # 3 + 29 x 2 + 1 layers over 32 stages: the string in Megatron's help, its m as a t.
    stages = partition(62, 16, 2, layout="Et*3|(tt|)*29,t|L")
    assert [len(stage.layers) for stage in stages] == [3] + [2] * 29 + [1, 0]
    assert stages[-1] == StageLayers(31, 15, 1, range(62, 62), False, True)
    assert parse_layout("Et|(tt|)*2 L") == ["Et", "tt", "tt", "L"]
    assert parse_layout("E((t|)*2t|)*2L") == ["Et", "t", "t", "t", "t", "t", "L"]
    assert sizes(3, 3, layout="E|t|ttL") == [0, 1, 2]


@pytest.mark.parametrize(
    ("args", "kwargs", "fragment"),
    [
        ((0, 4), {}, "num_layers=0: a size must be at least 1"),
        ((10, 4), {}, "num_layers=10: 10 layers do not split over 4 stages"),
        ((10, 4), {}, "nearest valid: 8, 12"),
        ((9, 4), {"count_embedding": True}, "9 layers and 1 counted as layers do not split"),
        ((10, 4), {"first_stage_layers": 2, "last_stage_layers": 1}, "last_stage_layers=1: that leaves 7 of 10 layers"),
        ((10, 4), {"first_stage_layers": 2, "last_stage_layers": 1}, "nearest valid: 0, 2, 4"),
        ((5, 4), {"last_stage_layers": 9}, "last_stage_layers=9: that leaves -4 of 5 layers"),
        ((5, 4), {"first_stage_layers": -1}, "first_stage_layers=-1"),
        ((5, 1), {"first_stage_layers": 5}, "there is one stage"),
        ((8, 4), {"first_stage_layers": 2, "count_loss": True}, "count_loss=True: first_stage_layers and last_stage"),
        ((2, 2), {"layout": "Et|tL", "first_stage_layers": 1}, "first_stage_layers=1: the layout already defines"),
        ((2, 2), {"layout": "Et|m|tL"}, "m asks for a multi-token prediction layer"),
        ((2, 2), {"layout": "Et|xL"}, "'x' means nothing here"),
        ((2, 2), {"layout": "Et|(tL"}, "an opening parenthesis has no closing one"),
        ((2, 2), {"layout": "Et|t)L"}, "a closing parenthesis has no opening one"),
        ((2, 2), {"layout": "*2Et|tL"}, "a * needs an item before"),
        ((2, 2), {"layout": "Et*|tL"}, "a * needs an item before"),
        ((2, 3), {"layout": "Et|tL"}, "2 stages do not split over pp=3 ranks"),
        ((4, 2), {"layout": "Et|t|t|tL"}, "vpp=1: the layout has 4 stages, which are 2 chunks"),
        ((3, 2), {"layout": "Et|tL"}, "num_layers=3: the layout has 2 layers; nearest valid: 2"),
        ((2, 2), {"layout": "t|EtL"}, "one E, and it comes first in the first stage"),
        ((2, 2), {"layout": "EtL|t"}, "one L, and it comes last in the last stage"),
    ],
)
def test_refusals(args: tuple[int, ...], kwargs: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError) as error:
        partition(*args, **kwargs)
    assert fragment in str(error.value)


@pytest.mark.parametrize("layout", ["Ettt|tttt|ttmL", "Et*9m|L", "E(t*3|)*3mL"])
def test_the_letter_of_multi_token_modules_is_refused_for_a_reason_that_holds(layout: str) -> None:
    with pytest.raises(ConfigError) as error:
        LayerSplit(layout=layout).stages(9, 3)
    assert "those (mtp_num_layers) are always beside the loss" in str(error.value)

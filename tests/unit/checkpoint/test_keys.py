"""The grammar of checkpoint keys: the spellings on disk, and that parsing is the inverse of building."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_megatron.checkpoint.tensors.keys import (
    MAIN,
    Key,
    groups_key,
    is_groups,
    model_key,
    model_name,
    rank_key,
    state_key,
    version_key,
    whole_state_key,
)


def test_the_spellings_on_disk_do_not_change():
    assert model_key("layers.0.w") == "model.layers.0.w"
    assert version_key("current_model_state", "layers.0.w") == "current_model_state.layers.0.w"
    assert state_key(1, "layers.0.w", "exp_avg") == "optimizer_1.state.layers.0.w.exp_avg"
    assert state_key(0, "w", MAIN) == "optimizer_0.state.w.master"
    assert whole_state_key(0, "w") == "optimizer_0.state.w.whole"
    assert groups_key(12) == "optimizer_12.param_groups"
    assert rank_key(pp=0, dp=1, cp=2, tp=3) == "per_rank.pp0-dp1-cp2-tp3"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model.layers.0.w", Key("model", "layers.0.w")),
        ("model.optimizer_0.state.w.step", Key("model", "optimizer_0.state.w.step")),
        ("optimizer_1.state.layers.0.w.exp_avg", Key("optimizer_1", "layers.0.w", "exp_avg")),
        ("optimizer_0.param_groups", Key("optimizer_0", "param_groups")),
        ("optimizer_x.state.w.step", Key("optimizer_x", "state.w.step")),
        ("optimizer_0.state.w", Key("optimizer_0", "state.w")),
        ("per_rank.pp0-dp1-cp0-tp0", Key("per_rank", "pp0-dp1-cp0-tp0")),
        ("model", Key("model")),
        ("model.", Key("model.")),
    ],
)
def test_a_key_is_taken_apart(text: str, parts: Key):
    assert Key.parse(text) == parts
    assert str(parts) == text


@given(
    st.lists(st.sampled_from(["model", "optimizer_0", "state", "param_groups", "w", "", ".", "\n"])).map(".".join)
    | st.text()
)
@example("optimizer_0.state.")
@example("optimizer_0.state..step")
def test_every_text_comes_back_from_its_parts(text: str):
    assert str(Key.parse(text)) == text


def test_kinds_of_keys():
    assert [model_name(key) for key in ("model.a.b", "model", "model.", "models.a")] == ["a.b", None, None, None]
    assert Key.parse("optimizer_0.state.w.step").is_optimizer
    assert not Key.parse("optimizer_states").is_optimizer
    assert is_groups("optimizer_3.param_groups")
    assert not is_groups("optimizer_3.state.param_groups.step")
    assert not is_groups("model.param_groups")


def test_calibration_of_fp8_is_told_from_a_module_of_that_name():
    assert Key.parse("model.layers.1.mlp.fc1.products.amax_history").is_calibration
    assert Key.parse("current_model_state.model.layers.1.mlp.fc1.products.amax_history").is_calibration
    assert Key.parse("model.qkv.products.scale").is_calibration
    assert not Key.parse("model.net.products.scale").is_calibration
    assert not Key.parse("model.products.weight").is_calibration
    assert not Key.parse("model.shop.products.0.bias").is_calibration


def test_keys_become_the_tree_that_lightning_consolidates():
    assert Key.parse("model.layers.0.w").path == ("model", "layers.0.w")
    assert Key.parse("optimizer_1.state.layers.0.w.exp_avg").path == ("optimizer_1", "state", "layers.0.w", "exp_avg")
    assert Key.parse("optimizer_0.param_groups").path == ("optimizer_0", "param_groups")
    assert Key.parse("per_rank.pp0-dp1-cp0-tp0").path == ("per_rank", "pp0-dp1-cp0-tp0")

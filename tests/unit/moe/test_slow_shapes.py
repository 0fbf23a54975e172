"""A warning where the routing decides shapes, on devices that compile for each shape; and none elsewhere."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightning_megatron import device as devices
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.lightning.validation.slow import warn_of_slow
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.moe.layer import MoELayer

RECIPES = Path(__file__).parents[3] / "lightning_megatron" / "tools" / "recipes"
CONFIG = TransformerConfig(
    1, 16, 2, 32, 16, ffn_hidden_size=16, add_bias_linear=False, activation="swiglu", num_experts=4
)


def told(kind: devices.DeviceKind, **fields: Any) -> list[str]:
    with torch.device("meta"):
        layer = MoELayer(replace(CONFIG, **fields), ParallelMesh.single(), sequence_parallel=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slow(nn.Sequential(layer, layer), kind)
    return [str(w.message) for w in caught]


def test_rows_that_change_in_number_are_told_once_with_what_to_set():
    (message,) = told(devices.HPU)
    assert message.startswith("moe_token_dispatcher='alltoall' without capacities: the number of rows")
    for remedy in ("moe_capacity_bins=10", "moe_pad_to_capacity=True", "moe_dynamic=True"):
        assert remedy in message
    assert message.endswith("compiled for on hpu")


def test_a_capacity_that_is_not_padded_to_fixes_no_shape():
    (message,) = told(devices.HPU, moe_capacity_factor=1.0)
    assert message.startswith("moe_token_dispatcher='alltoall' moe_capacity_factor=1.0 without padding")


@pytest.mark.parametrize(
    "fields",
    [{"moe_capacity_bins": 2}, {"moe_capacity_factor": 1.0, "moe_pad_to_capacity": True}, {"moe_dynamic": True}],
)
def test_fixed_shapes_are_fine(fields):
    assert told(devices.HPU, **fields) == []


@pytest.mark.parametrize("kind", [devices.CPU, devices.CUDA])
def test_other_devices_take_any_shape(kind):
    assert told(kind) == []


def test_the_recipes_have_fixed_shapes():
    recipes = sorted(RECIPES.glob("mixtral*.yaml"))
    assert len(recipes) == 2
    for recipe in recipes:
        fields = yaml.safe_load(recipe.read_text())["model"]["dict_kwargs"]
        assert fields["moe_capacity_bins"] > 1, recipe.name

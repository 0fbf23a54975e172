"""Placements of a model for which it is built anew, and those for which it is reused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.lightning.build.placement import Placement
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.ops.fp8 import Fp8Recipe
from lightning_megatron.ops.registry import Ops

MESH = ParallelMesh.single()
BUILT = Placement(MESH, ops=Ops(None, {"linear_fp8": "auto"}, Fp8Recipe(margin=1)))
OTHERS: dict[str, dict[str, Any]] = {
    "mesh": {"mesh": ParallelMesh.single()},
    "recompute": {"recompute": RecomputePlan("full")},
    "graphs": {"compile_backend": "inductor"},
    "modes": {"ops": Ops(None, {"linear_fp8": "off"}, Fp8Recipe(margin=1))},
    "recipe of fp8": {"ops": Ops(None, {"linear_fp8": "auto"}, Fp8Recipe(margin=2))},
}


def test_a_model_serves_its_own_placement_and_any_device_if_its_ops_follow_their_tensors() -> None:
    assert BUILT.is_valid_for(replace(BUILT))
    assert BUILT.is_valid_for(replace(BUILT, ops=replace(BUILT.ops, device="cpu")))
    here = replace(BUILT, ops=replace(BUILT.ops, device="cpu"))
    assert not here.is_valid_for(replace(BUILT, ops=replace(BUILT.ops, device="cuda")))


@pytest.mark.parametrize("difference", OTHERS)
def test_a_model_does_not_serve_another_placement(difference: str) -> None:
    assert not BUILT.is_valid_for(replace(BUILT, **OTHERS[difference]))

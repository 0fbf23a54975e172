"""A copy of a tied parameter, on the last stage under a name of its own, goes on with the steps of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from test_optim_fused_adamw import FusedAdamW
from torch import nn

from lightning_megatron.checkpoint import load, save
from lightning_megatron.lightning.checkpointing.trainer_state import continue_optimizer, optimizer_part
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.optim.zero import ShardedOptimizer
from lightning_megatron.params import ParamSpec, named_specs

MESH = ParallelMesh.single()


class Stage(nn.Module):
    """A pipeline stage with one parameter."""

    def __init__(self, name: str, tied_with: str | None = None) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(4, 2)))
        self.specs = {name: ParamSpec((4, 2), tied_with=tied_with)}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return self.specs


def sharded(stage: Stage) -> ShardedOptimizer:
    """Its optimizer, which counts steps as a number in its group, with state."""
    optimizer = ShardedOptimizer(FusedAdamW(stage.parameters()), named_specs(stage), MESH)
    optimizer.init_state()
    return optimizer


def test_a_copy_takes_the_number_of_steps_of_the_parameter_it_repeats(tmp_path: Path) -> None:
    first = sharded(Stage("embedding"))
    first.optimizer.param_groups[0]["step"] = 3
    state = optimizer_part(0, first, MESH, sharded=True)
    state["optimizer_0.param_groups"][0]["params"] = ["embedding", "head"]  # the groups of both stages
    save(tmp_path / "a.ckpt", state, {}, MESH)

    last = sharded(Stage("head", tied_with="embedding"))
    loaded = optimizer_part(0, last, MESH, sharded=True)
    load(tmp_path / "a.ckpt", loaded, MESH)
    continue_optimizer(0, last, loaded)
    assert last.optimizer.param_groups[0]["step"] == 3

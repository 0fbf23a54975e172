"""Packed documents in every kind of layout against the same documents one by one in one process.

Loss and all gradients: a few packings in fp32 with sums in another order, 1e-5 of the largest element of each tensor,
2e-5 where tensor parallelism splits more of them, as without documents. Any packing in fp64: 1e-6, as losses and the
factors before their gradients stay in fp32, and 5e-6 with experts, as routers do too. The gradient of a document's loss
with respect to what any other document is embedded as is exactly 0: nothing is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing import MICRO_BATCHES, Packing, halves, one_by_one, packings
from torch import Tensor

from lightning_megatron import GPTModule
from lightning_megatron.comm.collectives import all_reduce, local_shard
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.lightning.step.engine import StepEngine
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.params import named_specs
from lightning_megatron.pipeline.partition import LayerSplit
from lightning_megatron.stage import StageBoundary
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 36}
SIZES |= {"ffn_hidden_size": 24, "max_position_embeddings": 24, "init_std": 0.3, "vocab_multiple": 1}
MODELS: dict[str, TransformerConfig] = {
    "llama": preset("llama-tiny").replace(**SIZES, num_query_groups=2, tie_embeddings=False),
    # The losses that balance experts are of the whole sequence, and of no document.
    "mixtral": preset("mixtral-tiny").replace(**SIZES, num_query_groups=2, num_experts=4, moe_aux_loss_coeff=0.0),
}


@dataclass(frozen=True)
class Case:
    """A layout, with what else differs."""

    layout: ParallelLayout
    model: str = "llama"
    recompute: RecomputePlan = NO_RECOMPUTE
    schedule: str | None = None
    rtol: float = 1e-5
    dtype: torch.dtype = torch.float32

    @property
    def world_size(self) -> int:
        return self.layout.model_parallel_size

    @property
    def multiple(self) -> int:
        """Padding of whole sequences would be routed, so that models with experts refuse it."""
        return 8 if self.model == "mixtral" else 1


def layout(**sizes: Any) -> ParallelLayout:
    return ParallelLayout(**sizes)


FULL, CORE = RecomputePlan("full"), RecomputePlan("selective")
PARTS = RecomputePlan(("attention", "mlp"))
CASES = {
    "one rank": Case(layout()),
    "recomputed": Case(layout(), recompute=FULL),
    "core attention recomputed": Case(layout(), recompute=CORE),
    "experts": Case(layout(), "mixtral", recompute=PARTS),
    "tp2": Case(layout(tp=2, sequence_parallel=False), rtol=2e-5),
    "tp2 sp": Case(layout(tp=2), recompute=CORE, rtol=2e-5),
    "cp2 ring": Case(layout(cp=2)),
    "cp2 all-gather": Case(layout(cp=2, cp_comm_type="all_gather")),
    "cp2 all-to-all": Case(layout(cp=2, cp_comm_type="a2a")),
    "cp3 ring": Case(layout(cp=3)),
    "cp4 ring": Case(layout(cp=4)),
    "cp4 all-gather": Case(layout(cp=4, cp_comm_type="all_gather"), recompute=FULL),
    "cp4 all-to-all": Case(layout(cp=4, cp_comm_type="a2a")),
    "tp2 sp cp2 ring": Case(layout(tp=2, cp=2), recompute=FULL, rtol=2e-5),
    "tp2 cp2 all-to-all": Case(layout(tp=2, cp=2, cp_comm_type="a2a", sequence_parallel=False), rtol=2e-5),
    "pp2": Case(layout(pp=2), schedule="1f1b"),
    "pp2 vpp2": Case(layout(pp=2, vpp=2), recompute=CORE, schedule="interleaved"),
    "pp2 tp2 sp": Case(layout(tp=2, pp=2), schedule="zero-bubble", rtol=2e-5),
    "pp2 cp2 ring": Case(layout(pp=2, cp=2), recompute=FULL, schedule="1f1b"),
    "ep2 tp2 sp": Case(layout(tp=2, ep=2, etp=1), "mixtral", rtol=2e-5),
    "ep2 cp2 ring": Case(layout(cp=2, ep=2), "mixtral", recompute=FULL),
    "ep2 tp2 cp2 all-gather": Case(layout(tp=2, cp=2, ep=2, etp=2, cp_comm_type="all_gather"), "mixtral", rtol=2e-5),
    "ep2 cp2 pp2 all-to-all": Case(layout(cp=2, pp=2, ep=2, cp_comm_type="a2a"), "mixtral", PARTS, schedule="1f1b"),
}


class Plain(GPTModule):
    """A step that logs nothing: there is no Trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def reference_of(name: str) -> GPTModel:
    torch.manual_seed(2)
    model = GPTModel(MODELS[name])
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1 or not param.any():
                param.add_(torch.randn_like(param), alpha=0.2)
    return model


@lru_cache(maxsize=2048)
def expected_of(name: str, packing: Packing, dtype: torch.dtype) -> dict[str, Tensor]:
    return one_by_one(_reference(name, dtype), packing)


@lru_cache
def _reference(name: str, dtype: torch.dtype) -> GPTModel:
    return reference_of(name).to(dtype)


def module_on(mesh: ParallelMesh, case: Case) -> tuple[Plain, StageBoundary | None]:
    """The model of a case on a mesh, with the weights of the reference."""
    module, reference = Plain(MODELS[case.model]), reference_of(case.model)
    parts, boundary = None, None
    if mesh.layout.pp > 1:
        stages = LayerSplit().stages(SIZES["num_layers"], mesh.layout.pp, mesh.layout.vpp)
        parts = [stage for stage in stages if stage.rank == mesh.pp.rank]
        boundary = StageBoundary(len(stages))
    module.model = GPTModel(module.config, mesh, parts, boundary, case.recompute)
    load_whole(module.model, dict(reference.named_parameters()), mesh)
    return module.to(case.dtype), boundary


def check(case: Case, packings_: Sequence[Packing], wanted: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Differences of this rank from the documents one by one, by packing; empty if there are none."""
    mesh = ParallelMesh.create(case.layout, CPU)
    module, boundary = module_on(mesh, case)
    engine = StepEngine(mesh, boundary, case.schedule, 2, CPU, case.dtype)
    found = {}
    for packing, expected in zip(packings_, wanted, strict=True):
        faults = _differences(module, engine, mesh, packing, expected, case.rtol)
        if faults:
            found[str(packing)] = faults
    return found


def _differences(
    module: Plain, engine: StepEngine, mesh: ParallelMesh, packing: Packing, expected: dict[str, Tensor], rtol: float
) -> dict[str, Any]:
    model = module.model
    assert model is not None
    model.zero_grad()
    embedded: list[Tensor] = []
    hook = None
    if model.embedding is not None:
        hook = model.embedding.register_forward_hook(lambda _module, _args, out: embedded.append(_kept(out)))
    pieces = [(half, 1 / MICRO_BATCHES) for half in halves(packing.batch(module.config.vocab_size))]
    output = engine.train(module, pieces, (0,), 1.0, None)
    if hook is not None:
        hook.remove()
    faults: dict[str, Any] = {}
    if packing.asked is not None:
        for inside, out in zip(halves({"tokens": packing.asked_for()}), embedded, strict=False):
            own = model._sharding.shard(inside["tokens"], 1).t()
            own = local_shard(own, mesh.tp) if model.sequence_parallel else own
            assert out.grad is not None
            if out.grad[~own].any():
                faults["leak"] = out.grad[~own].abs().max().item()
    for _, param, spec in named_specs(model):
        if param.grad is not None:
            param.grad = (param.grad if spec.is_expert else all_reduce(param.grad, mesh.cp)) / mesh.cp.size
    ours = {"loss": output, **whole_gradients(model, mesh)}
    return faults | differences(ours, {name: expected[name] for name in ours}, rtol=rtol, atol=2e-7)


def _kept(out: Tensor) -> Tensor:
    out.retain_grad()
    return out


def run(ranks: Ranks, case: Case, some: Sequence[Packing]) -> None:
    wanted = [expected_of(case.model, packing, case.dtype) for packing in some]
    assert ranks(case.world_size, check, case, list(some), wanted) == [{}] * case.world_size


FEW = [
    Packing(((5, 3, 8), (16,), (1, 2, 3, 4, 6), (7, -2, 7)), 1),
    Packing(((-3, 13), (4, 4, 4, 4), (-16,), (9, 7)), 2, (0, 1, 0, 1)),
    Packing(((1,) * 8, (2, 6), (8,), (-1, 7)), 3, (4, 1, 0, 0)),
]
ODD = Packing(((5, 6), (11,), (2, 2, 3, 4), (1, -10)), 4, (1, 0, 2, 0))
QUICK = ("one rank", "cp2 ring", "cp2 all-gather", "cp2 all-to-all", "tp2 sp")
CHEAP = ("recomputed", "experts", "tp2 sp cp2 ring", "pp2 vpp2", "ep2 cp2 ring", "ep2 cp2 pp2 all-to-all")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CHEAP)])
def test_a_few_packings_equal_their_documents_one_by_one(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    run(ranks, case, FEW if case.multiple > 1 else [*FEW, ODD])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_any_packing_equals_its_documents_one_by_one(ranks: Ranks, name: str) -> None:
    """500 packings in each layout, 25 to a call; what fails is made as small as it can be."""
    rtol = 5e-6 if CASES[name].model == "mixtral" else 1e-6
    case = replace(CASES[name], rtol=rtol, dtype=torch.float64)

    @settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(packings(case.multiple), min_size=25, max_size=25))
    def property_holds(some: list[Packing]) -> None:
        run(ranks, case, some)

    property_holds()

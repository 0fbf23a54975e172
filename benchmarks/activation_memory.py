"""Bytes that a layer keeps for its backward, measured and by the formulas of https://arxiv.org/abs/2205.05198.

    python benchmarks/activation_memory.py

Two GPT layers in bf16 with dropout 0.1, as a pipeline stage without embedding and loss, on one rank and on two
tensor-parallel ranks. Measured, for each layer, is the memory of operations' results that is alive after the forward:
the layers' input counts, parameters and the output do not. Prints a Markdown table in units of ``s b h``: sequence
times batch times hidden size.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.activations import MiddleStage
from lightning_megatron.testing.workers import WorkerPool

LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """Sizes by the paper's letters."""

    s: int
    b: int
    h: int
    a: int


@dataclass(frozen=True)
class Case:
    """A plan on a layout.

    Attributes:
        name: name of the plan.
        plan: plan of recomputation.
        t: tensor-parallel ranks.
        sp: sequence parallelism.
        drops: dropout of attention weights, for which a CPU has no fused kernel, so that core attention keeps scores as
            in the paper; without dropout it keeps none.
    """

    name: str
    plan: RecomputePlan
    t: int = 1
    sp: bool = False
    drops: bool = False

    def formula(self, shape: Shape) -> float:
        """Bytes of a layer over ``s b h``; sharded parts are divided by ``t``."""
        t, cut = self.t, self.t if self.sp or self.plan.shard_saved else 1
        whole = 10 / cut + 24 / t
        if self.plan.granularity == "full" and self.plan.method == "block":
            return (self.plan.num_layers * 2 / cut + (LAYERS - self.plan.num_layers) * whole) / LAYERS
        if self.plan.granularity == "full":
            return 2 / cut / self.plan.num_layers
        if self.plan.wraps("attention"):
            return 6 / cut  # the inputs of two sub-layers and two dropout masks: not in the paper
        scores = 5 * shape.a * shape.s / shape.h / t
        return whole + scores if self.drops and not self.plan.wraps("core_attn") else whole


NONE, SELECTIVE = RecomputePlan(), RecomputePlan("selective")
PARTS, FULL = RecomputePlan(["attention", "mlp"]), RecomputePlan("full")
ONE_RANK = [
    Case("none", NONE),
    Case("none", NONE, drops=True),
    Case("selective", SELECTIVE),
    Case("selective", SELECTIVE, drops=True),
    Case("attention, mlp", PARTS, drops=True),
    Case("full, block, 1 of 2 layers", RecomputePlan("full", "block")),
    Case("full", FULL, drops=True),
    Case("full, groups of 2 layers", RecomputePlan("full", num_layers=2), drops=True),
]
TWO_RANKS = [
    *(
        Case(name, plan, 2, sp, drops)
        for sp in (False, True)
        for name, plan, drops in [
            ("none", NONE, False),
            ("none", NONE, True),
            ("selective", SELECTIVE, True),
            ("attention, mlp", PARTS, True),
            ("full", FULL, True),
        ]
    ),
    Case("full, in shares", RecomputePlan("full", shard_saved=True), 2, drops=True),
]


def measure(cases: list[Case], shape: Shape) -> list[float]:
    """Bytes of a layer over ``s b h``, for each case, on this rank."""
    return [_measured(case, shape) for case in cases]


def _measured(case: Case, shape: Shape) -> float:
    layout = ParallelLayout(tp=case.t, sequence_parallel=case.sp)
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    config = TransformerConfig(
        LAYERS, shape.h, shape.a, 64, shape.s, hidden_dropout=0.1, attention_dropout=0.1 if case.drops else 0.0
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        stage = MiddleStage(config, mesh, case.plan)
    finally:
        torch.set_default_dtype(before)
    return stage.kept_bytes(shape.s, shape.b) / LAYERS / (shape.s * shape.b * shape.h)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    args = parser.parse_args()
    shape = Shape(args.sequence, args.batch, args.hidden, args.heads)
    print("| recompute | attention dropout | t | sequence parallel | formula | measured | ratio |")
    print("|---|---|---|---|---|---|---|")
    with WorkerPool(2, timeout=600) as pool:
        for ranks, cases in ((1, ONE_RANK), (2, TWO_RANKS)):
            measured = pool.run(ranks, measure, cases, shape)
            for case, found in zip(cases, zip(*measured, strict=True), strict=True):
                formula, largest = case.formula(shape), max(found)
                print(
                    f"| {case.name} | {0.1 if case.drops else 0} | {case.t} | {'yes' if case.sp else 'no'}"
                    f" | {formula:.2f} | {largest:.2f} | {largest / formula:.3f} |"
                )


if __name__ == "__main__":
    main()

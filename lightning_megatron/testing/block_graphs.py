"""Graphs and breaks of ``torch.compile`` in parts of small models on several layouts, for a benchmark and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.lightning.compat._private import CompilerCounts, compiler_counts
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import configuration
from lightning_megatron.ops.registry import Ops

PARTS = ("block", "embedding", "head")


@dataclass(frozen=True)
class Case:
    """A model on a layout.

    Attributes:
        name: name in the table.
        ranks: number of processes.
        layout: arguments of the layout.
        family: family of the model.
        recompute: plan of activation recomputation.
        more: fields of the configuration.
        dtype: dtype of the parameters.
    """

    name: str
    ranks: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    recompute: Any = None
    more: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


_TP = {"tp": 2, "sequence_parallel": False}
_SP = {"tp": 2, "sequence_parallel": True}
CASES = [
    Case("tp 1"),
    Case("tp 1, bf16", dtype=torch.bfloat16),
    Case("tp 1, GPT with dropout", family="gpt", more={"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    Case("tp 1, recompute selective", recompute="selective"),
    Case("tp 1, recompute mlp", recompute=["mlp"]),
    Case("tp 2", 2, _TP),
    Case("tp 2, sequence parallel", 2, _SP),
    Case("tp 2, sequence parallel, recompute selective", 2, _SP, recompute="selective"),
    Case("cp 2, a2a", 2, {"cp": 2, "cp_comm_type": "a2a"}),
    Case("cp 2, p2p", 2, {"cp": 2}),
    Case("experts, moe_dynamic", family="mixtral", more={"moe_dynamic": True}),
    Case("experts, capacity bins", family="mixtral", more={"moe_capacity_bins": 2}),
]


def count(case: Case, device: str, parts: tuple[str, ...] = PARTS) -> dict[str, CompilerCounts]:
    """Graphs and breaks of each part in one forward and backward, on this rank.

    Each part is compiled by itself, in a model of two equal layers that share a graph; backward graphs do not count.
    """
    found = {}
    for part in parts:
        torch.compiler.reset()
        before = compiler_counts()
        gradients(case, part, device)
        found[part] = compiler_counts().since(before)
    return found


def gradients(case: Case, part: str | None, device: str) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter on this rank, after one forward and backward.

    Args:
        case: the model on its layout.
        part: the part that is compiled; ``None`` for none.
        device: its type.
    """
    here = torch.device(device)
    mesh = ParallelMesh.create(ParallelLayout(**case.layout), here) if case.ranks > 1 else ParallelMesh.single(here)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "vocab_multiple": 16}
    config = configuration(f"{case.family}-tiny", **{**sizes, **case.more})
    torch.manual_seed(2)
    model = GPTModel(config, mesh, recompute=RecomputePlan(case.recompute), ops=Ops(here.type))
    model.to(device=here, dtype=case.dtype)
    compiled: dict[str, list[Any]] = {
        "block": list(model.layers.values()),
        "embedding": [model.embedding],
        "head": [model.head],
    }
    for each in compiled[part] if part else ():
        each.compile(backend="aot_eager", dynamic=False)
    tokens = torch.randint(128, (2, 128), generator=torch.Generator().manual_seed(1)).to(here)
    loss = model(tokens, labels=tokens)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach().cpu(), **{name: grad.cpu() for name, grad in grads.items()}}

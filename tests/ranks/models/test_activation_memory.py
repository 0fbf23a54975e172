"""Memory that a layer keeps for its backward, against https://arxiv.org/abs/2205.05198, within 5 %.

The formulas are those of its table 2: bytes of a GPT layer in 16 bits over ``s b h``. Where core attention is fused it
keeps no scores, and the term ``5 a s / h`` is absent.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import NO_RECOMPUTE, RecomputePlan
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.presets import preset
from lightning_megatron.testing.activations import MiddleStage

LAYERS = 2
S, B, H, A = 256, 2, 256, 4
SCORES = 5 * A * S / H  # of dropout of attention weights, with softmax and what is left of it
WITHOUT = partial(TransformerConfig, LAYERS, H, A, 64, S, hidden_dropout=0.1)
CONFIGS = {
    "gpt": WITHOUT(),
    "gpt, attention dropout": WITHOUT(attention_dropout=0.1),
    "llama": preset("llama-tiny").replace(
        num_layers=LAYERS, hidden_size=H, num_attention_heads=A, num_query_groups=A, head_dim=64, ffn_hidden_size=2 * H,
        vocab_size=64, max_position_embeddings=S,
    ),
}  # fmt: skip
# Inputs of two norms, of qkv and of fc1: 8. After rope q, k, v: 6; the core's output, which is the projection's input:
# 2. fc1's output, gate and up, and fc2's input: 8 + 4. No dropout, and rms_norm keeps one number a token. As many key
# heads as query heads: for fewer, torch 2.6 has no fused kernel on a CPU.
LLAMA_LAYER = 28
FULL, SELECTIVE = RecomputePlan("full"), RecomputePlan("selective")
Case = tuple[str, RecomputePlan, bool, float]
# Model, plan, sequence parallelism, formula.
ONE_RANK: list[Case] = [
    ("gpt", NO_RECOMPUTE, False, 34),
    ("gpt, attention dropout", NO_RECOMPUTE, False, 34 + SCORES),
    ("gpt, attention dropout", SELECTIVE, False, 34),
    ("gpt, attention dropout", RecomputePlan(["attention"]), False, 24),
    ("gpt", RecomputePlan(["mlp"]), False, 16),
    ("gpt, attention dropout", RecomputePlan(["attention", "mlp"]), False, 6),
    ("gpt, attention dropout", FULL, False, 2),
    ("gpt, attention dropout", RecomputePlan("full", num_layers=2), False, 1),
    ("gpt", RecomputePlan("full", "block"), False, (2 + 34) / 2),
    ("llama", NO_RECOMPUTE, False, LLAMA_LAYER),
]
TWO_RANKS: list[Case] = [
    ("gpt", NO_RECOMPUTE, False, 10 + 24 / 2),
    ("gpt", NO_RECOMPUTE, True, 34 / 2),
    ("gpt, attention dropout", NO_RECOMPUTE, False, 10 + 24 / 2 + SCORES / 2),
    ("gpt, attention dropout", NO_RECOMPUTE, True, (34 + SCORES) / 2),
    ("gpt, attention dropout", SELECTIVE, False, 10 + 24 / 2),
    ("gpt, attention dropout", SELECTIVE, True, 34 / 2),
    ("gpt, attention dropout", FULL, False, 2),
    ("gpt, attention dropout", FULL, True, 2 / 2),
    ("gpt, attention dropout", RecomputePlan("full", shard_saved=True), False, 2 / 2),
]


def kept(cases: list[Case], tp: int) -> list[float]:
    """Bytes of one layer over ``s b h`` on this rank."""
    found = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, plan, sp, _ in cases:
            mesh = ParallelMesh.create(ParallelLayout(tp=tp, sequence_parallel=sp), torch.device("cpu"))
            found.append(MiddleStage(CONFIGS[name], mesh, plan).kept_bytes(S, B) / LAYERS / (S * B * H))
    finally:
        torch.set_default_dtype(before)
    return found


@pytest.mark.parametrize(("tp", "cases"), [(1, ONE_RANK), (2, TWO_RANKS)])
def test_a_layer_keeps_what_the_paper_says(ranks, tp, cases):
    for rank in ranks(tp, kept, cases, tp):
        wrong = {
            f"{name}, {plan}, sequence_parallel={sp}": (measured, formula)
            for (name, plan, sp, formula), measured in zip(cases, rank, strict=True)
            if measured != pytest.approx(formula, rel=0.05)
        }
        assert not wrong

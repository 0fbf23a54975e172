"""BERT on 2 and 4 ranks against the same model on one: losses of both heads, logits, all gradients.

Tolerance: fp32 with sums split over ranks, twice a layer: 2e-5 of the largest element of each tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.encoders.bert.config import BertConfig
from lightning_megatron.encoders.bert.model import BertInputs, BertModel
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

VOCAB, B = 37, 3
SMALL = BertConfig(2, 32, 8, VOCAB, 16, vocab_multiple=4, init_std=0.3)
MODELS = {
    "as published": SMALL,
    "norms before, untied, smoothed": SMALL.replace(
        norm_position="before", tie_embeddings=False, label_smoothing=0.1, num_token_types=0, activation="relu"
    ),
}


def models(config: BertConfig, mesh: ParallelMesh, recompute: Any) -> tuple[BertModel, BertModel]:
    """A model with all parameters drawn at random, and its image on the mesh."""
    torch.manual_seed(2)
    reference = BertModel(config)
    with torch.no_grad():
        for param in reference.parameters():
            if param.ndim == 1 or not param.any():
                param.add_(torch.randn_like(param), alpha=0.2)
    model = BertModel(config, mesh, recompute=RecomputePlan(recompute))
    load_whole(model, dict(reference.named_parameters()), mesh)
    return reference, model


def batches() -> dict[str, tuple[BertInputs, torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    generator, found = torch.Generator().manual_seed(1), {}
    for name, length in (("padded", 16), ("odd", 11), ("whole", 8), ("odd, whole", 7)):
        tokens = torch.randint(VOCAB, (B, length), generator=generator)
        labels = torch.randint(VOCAB, (B, length), generator=generator)
        labels[torch.rand(B, length, generator=generator) > 0.5] = -100
        mask = None
        if "whole" not in name:
            mask = torch.arange(length) < torch.tensor([[length], [length // 2], [3]])
            labels[~mask] = -100
        types = torch.randint(2, (B, length), generator=generator) if length > 8 else None
        inputs = BertInputs(tokens, None if types is None else types, mask)
        weights = torch.rand(B, length, generator=generator) if name == "padded" else None
        found[name] = inputs, labels, weights, torch.tensor([0, 1, -100])
    return found


def check_bert(tp: int, sp: bool, cp: int, recompute: Any, way: str = "a2a") -> dict[str, Any]:
    layout = ParallelLayout(tp=tp, sequence_parallel=sp, cp=cp, cp_comm_type=way)
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    wrong: dict[str, Any] = {}
    for name, config in MODELS.items():
        reference, model = models(config, mesh, recompute)
        for kind, given in batches().items():
            outcomes: list[dict[str, Any]] = []
            for candidate, where in ((model, mesh), (reference, ParallelMesh.single())):
                candidate.zero_grad()
                losses = candidate.losses(*given)
                losses.total.backward()
                for param in candidate.parameters():
                    if param.grad is not None:  # the optimizer takes the mean over context-parallel ranks
                        param.grad = all_reduce(param.grad, where.cp) / where.cp.size
                with torch.no_grad():
                    logits = candidate(given[0])
                found = {"tokens": logits.tokens, "next": logits.next_sentence, "token loss": losses.tokens}
                found["next loss"] = losses.next_sentence
                if given[0].padding_mask is not None:
                    found["tokens"] = found["tokens"][given[0].padding_mask.bool()]
                outcomes.append({**found, **whole_gradients(candidate, where)})
            wrong[f"{name}, {kind}"] = differences(*outcomes, rtol=2e-5, atol=2e-6)
    return {case: faults for case, faults in wrong.items() if faults}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "sp", "cp", "recompute"),
    [
        (2, False, 1, None),
        (2, True, 1, None),
        (1, False, 2, None),
        pytest.param(2, True, 1, "full", marks=SLOW),
        pytest.param(2, True, 1, "selective", marks=SLOW),
        pytest.param(4, True, 1, None, marks=SLOW),
        pytest.param(4, False, 1, None, marks=SLOW),
        pytest.param(2, True, 2, None, marks=SLOW),
        pytest.param(2, False, 2, "full", marks=SLOW),
        pytest.param(1, False, 4, None, marks=SLOW),
    ],
)
def test_losses_logits_and_all_gradients_equal_one_process(
    ranks: Any, tp: int, sp: bool, cp: int, recompute: Any
) -> None:
    assert ranks(tp * cp, check_bert, tp, sp, cp, recompute) == [{}] * (tp * cp)


@pytest.mark.parametrize(
    ("way", "cp", "recompute"),
    [
        ("p2p", 2, None),
        ("all_gather", 2, None),
        pytest.param("p2p", 4, "full", marks=SLOW),
        pytest.param("all_gather", 4, "selective", marks=SLOW),
    ],
)
def test_padding_is_left_out_however_ranks_share_a_sequence(ranks: Any, way: str, cp: int, recompute: Any) -> None:
    assert ranks(cp, check_bert, 1, False, cp, recompute, way) == [{}] * cp

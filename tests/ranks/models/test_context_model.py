"""GPT and LLaMA over context-parallel ranks against the same model on one: loss, logits and all gradients.

Gradients are averaged over context-parallel ranks as the optimizer does. Tolerance: fp32 with sums split over ranks,
1e-5 of the largest element of each tensor, 2e-5 where tensor parallelism splits more of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model_parity import GPT, LLAMA, VOCAB, B, reference_and
from torch import Tensor

from lightning_megatron.comm.collectives import all_reduce
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.rope_scaling import DynamicScaling
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.testing.parity import differences, whole_gradients

MODELS = {
    "gpt": GPT.replace(max_position_embeddings=16),
    "gpt, untied, smoothed": GPT.replace(max_position_embeddings=16, tie_embeddings=False, label_smoothing=0.1),
    "llama": LLAMA.replace(max_position_embeddings=16),
    # Angles follow from the length of the whole sequence, without its padding; norms of heads are whole on every rank.
    "llama, normed heads, dynamic angles": LLAMA.replace(
        max_position_embeddings=16, qk_norm=True, add_qkv_bias=True, rope_scaling=DynamicScaling(2.0, 6)
    ),
}


def batches() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def batch(length: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCAB, (B, length + 1), generator=generator)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].clone()}

    masked, late, moved, odd = batch(16), batch(16), batch(16), batch(11)
    masked["loss_mask"] = (torch.rand(B, 16, generator=generator) > 0.4).float()
    late["labels"][:, :12] = -100  # all tokens that count are on one rank of four
    moved["position_ids"] = torch.arange(8).repeat(B, 2)
    return {"masked": masked, "late": late, "position ids": moved, "odd length": odd}


def outcome(model: GPTModel, mesh: ParallelMesh, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and logits, and gradients of both together."""
    model.zero_grad()
    kept = {name: x.clone() for name, x in batch.items()}
    loss = model(**batch)
    logits = model(batch["tokens"], position_ids=batch.get("position_ids"))
    own = logits.float().log_softmax(-1)[..., 3].mean()  # a user's own loss on logits
    (loss + own).backward()
    assert all(torch.equal(x, batch[name]) for name, x in kept.items()), "the user's batch has changed"
    for param in model.parameters():
        if param.grad is not None:
            param.grad = all_reduce(param.grad, mesh.cp) / mesh.cp.size
    return {"loss": loss.detach(), "logits": logits.detach(), **whole_gradients(model, mesh)}


def check_models(layout: ParallelLayout, rtol: float) -> dict[str, Any]:
    mesh, alone = ParallelMesh.create(layout, torch.device("cpu")), ParallelMesh.single()
    wrong: dict[str, Any] = {}
    for name, config in MODELS.items():
        reference, model = reference_and(mesh, config)
        for kind, batch in batches().items():
            if kind in ("masked", "odd length") or name.startswith("llama"):
                ours, expected = outcome(model, mesh, batch), outcome(reference, alone, batch)
                wrong[f"{name}, {kind}"] = differences(ours, expected, rtol=rtol)
    return {case: faults for case, faults in wrong.items() if faults}


COMM_TYPES = ("p2p", "all_gather", "a2a")
SIZES = {"cp2": (1, 2, None), "cp4": (1, 4, None), "tp2cp2sp": (2, 2, True), "tp2cp2": (2, 2, False)}
OFTEN = [*(("cp2", each) for each in COMM_TYPES), ("cp4", "p2p"), ("tp2cp2sp", "a2a")]
GRID = [(name, each) for name in SIZES for each in COMM_TYPES]


@pytest.mark.parametrize(
    ("tp", "cp", "sp", "comm_type"),
    [
        pytest.param(*SIZES[name], each, marks=() if (name, each) in OFTEN else pytest.mark.slow, id=f"{name}-{each}")
        for name, each in GRID
    ],
)
def test_loss_logits_and_all_gradients_equal_one_process(ranks, tp, cp, sp, comm_type):
    layout = ParallelLayout(tp=tp, cp=cp, sequence_parallel=sp, cp_comm_type=comm_type)
    assert ranks(tp * cp, check_models, layout, 1e-5 if tp == 1 else 2e-5) == [{}] * (tp * cp)


def shapes(layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Shape of a stage's output, as the model states it and as it is."""
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    _, model = reference_and(mesh, MODELS["gpt"])
    found: list[tuple[int, ...]] = []
    for block in model.layers.values():
        block.register_forward_hook(lambda module, args, out: found.append(tuple(out[0].shape)))
    for length in (16, 11, 1):
        tokens = torch.zeros(B, length, dtype=torch.long)
        assert model(tokens).shape == (B, length, VOCAB)
        assert found[-1] == model.hidden_shape(tokens)
    return [found[0], found[2], found[4]]


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        (ParallelLayout(cp=2), [8, 6, 2]),
        (ParallelLayout(cp=4), [4, 4, 2]),
        (ParallelLayout(tp=2, cp=2), [4, 4, 2]),
        (ParallelLayout(tp=2, cp=2, sequence_parallel=False), [8, 6, 2]),
    ],
    ids=str,
)
def test_shards_are_as_long_as_the_model_says(ranks, layout, lengths):
    for found in ranks(4 if layout != ParallelLayout(cp=2) else 2, shapes, layout):
        assert found == [(length, B, 32) for length in lengths]


def with_dropout(layout: ParallelLayout) -> dict[str, Any]:
    """Losses of two steps with every dropout there is, and which elements of the embedding were dropped here."""
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    mesh.rng.place(tp_rank=mesh.tp.rank, cp_rank=mesh.cp.rank)
    torch.manual_seed(7)
    model = GPTModel(MODELS["gpt"].replace(hidden_dropout=0.3, attention_dropout=0.3), mesh)
    dropped: list[Any] = []
    assert model.embedding is not None
    model.embedding.register_forward_hook(lambda module, args, out: dropped.append((out == 0).flatten().tolist()))
    batch = batches()["masked"]
    return {"losses": [model(**batch).item() for _ in range(2)], "dropped": dropped[0], "next": torch.rand(()).item()}


@pytest.mark.parametrize("sp", [True, False])
def test_masks_differ_where_tokens_do_and_agree_where_they_are_the_same(ranks, sp):
    layout = ParallelLayout(tp=2, cp=2, sequence_parallel=sp, cp_comm_type="a2a")
    found = ranks(4, with_dropout, layout)
    assert len({tuple(rank["losses"]) for rank in found}) == 1, "all ranks compute one loss"
    assert found[0]["losses"][0] != found[0]["losses"][1], "another mask in the second step"
    assert len({rank["next"] for rank in found}) == 1, "nothing has moved the stream that all share"
    masks = [rank["dropped"] for rank in found]  # tp is the faster axis
    assert masks[0] != masks[2]
    assert (masks[0] == masks[1]) != sp
    assert 0.2 < sum(masks[0]) / len(masks[0]) < 0.4

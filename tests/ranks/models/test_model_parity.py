"""GPT and LLaMA on 1, 2 and 4 ranks, with and without sequence parallelism, against the same model on one.

Tolerance: fp32 with sums split over ranks, twice a layer: 2e-5 of the largest element of each tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.transformer import TransformerConfig
from lightning_megatron.layers.attention import KVCache
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.models.generate import generate
from lightning_megatron.models.gpt import GPTModel
from lightning_megatron.models.presets import preset
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients

VOCAB, B = 37, 3
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "vocab_size": VOCAB, "vocab_multiple": 4}
GPT = TransformerConfig(**SMALL, max_position_embeddings=8, init_std=0.3)  # type: ignore[arg-type]
LLAMA = preset("llama3.1-8b").replace(
    **SMALL, num_query_groups=4, ffn_hidden_size=48, max_position_embeddings=8, init_std=0.3
)
LATENTS = LLAMA.replace(num_query_groups=8, kv_lora_rank=12, q_lora_rank=20, head_dim=10, rope_head_dim=4, v_head_dim=7)
MODELS = {
    "gpt": GPT,
    "gpt, untied, smoothed": GPT.replace(tie_embeddings=False, label_smoothing=0.1),
    "llama": LLAMA,
    "llama, tied": LLAMA.replace(tie_embeddings=True),
    "latents": LATENTS,
    "latents of keys alone, with biases": LATENTS.replace(
        q_lora_rank=0, add_qkv_bias=True, add_attention_out_bias=True
    ),
}


def reference_and(mesh: ParallelMesh, config: TransformerConfig) -> tuple[GPTModel, GPTModel]:
    """A model with all parameters drawn at random (biases too), and its image on the mesh."""
    torch.manual_seed(2)
    reference = GPTModel(config)
    with torch.no_grad():
        for param in reference.parameters():
            if param.ndim == 1 or not param.any():
                param.add_(torch.randn_like(param), alpha=0.2)
    model = GPTModel(config, mesh)
    load_whole(model, dict(reference.named_parameters()), mesh)
    return reference, model


def batches() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def batch(length: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCAB, (B, length + 1), generator=generator)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].clone()}

    masked, holes, moved, odd, full = batch(8), batch(8), batch(8), batch(5), batch(7)
    masked["loss_mask"] = (torch.rand(B, 8, generator=generator) > 0.4).float()
    holes["labels"][0, 3:] = -100
    moved["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 0, 1, 2], [0] * 8])
    odd["position_ids"] = torch.tensor([[0, 1, 0, 1, 2]] * B)
    odd["loss_mask"] = torch.ones(B, 5)
    return {"masked": masked, "holes": holes, "position ids": moved, "odd length": odd, "odd, no positions": full}


def check_models(tp: int, sp: bool) -> dict[str, dict[str, str]]:
    layout = ParallelLayout(tp=tp, sequence_parallel=sp)
    mesh = ParallelMesh.create(layout, torch.device("cpu"))
    wrong: dict[str, dict[str, str]] = {}
    for name, config in MODELS.items():
        reference, model = reference_and(mesh, config)
        for kind, batch in batches().items():
            outcomes: list[dict[str, Any]] = []
            for candidate, where in ((model, mesh), (reference, ParallelMesh.single())):
                candidate.zero_grad()
                loss = candidate(**batch)
                loss.backward()
                logits = candidate(batch["tokens"], position_ids=batch.get("position_ids"))
                outcomes.append({"loss": loss, "logits": logits, **whole_gradients(candidate, where)})
            wrong[f"{name}, {kind}"] = differences(*outcomes, rtol=2e-5)
    return {case: faults for case, faults in wrong.items() if faults}


TP2_SP = pytest.param(2, True, marks=pytest.mark.gate)
TP4, TP4_SP = (pytest.param(4, sp, marks=pytest.mark.slow) for sp in (False, True))


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), TP2_SP, TP4, TP4_SP])
def test_loss_logits_and_all_gradients_equal_one_process(ranks, tp, sp):
    assert ranks(tp, check_models, tp, sp) == [{}] * tp


def test_positions_that_fill_the_model_leave_room_for_padding(ranks):
    """7 tokens, 7 learned positions, 2 ranks: the padded eighth token has no position of its own."""
    assert ranks(2, logits_at_the_last_position, 7) == ranks(1, logits_at_the_last_position, 7) * 2


def logits_at_the_last_position(length: int) -> list[int]:
    mesh = ParallelMesh.create(ParallelLayout(tp=torch.distributed.get_world_size()), torch.device("cpu"))
    _, model = reference_and(mesh, GPT.replace(max_position_embeddings=length))
    logits: Tensor = model(torch.arange(length).unsqueeze(0))
    return logits.argmax(-1).flatten().tolist()


def decode_in_pieces(model: GPTModel, tokens: Tensor, cuts: list[int]) -> Tensor:
    """Logits after each piece of ``tokens``, fed one after the other with caches."""
    caches = [KVCache() for _ in model.layers]
    pieces = tokens.tensor_split(cuts, dim=1)
    logits = torch.cat([model(piece, caches=caches) for piece in pieces], dim=1)
    assert [cache.length for cache in caches] == [tokens.shape[1]] * len(caches)
    return logits


def check_decoding(tp: int, sp: bool) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp, sequence_parallel=sp), torch.device("cpu"))
    wrong: dict[str, Any] = {}
    tokens = torch.randint(VOCAB, (B, 8), generator=torch.Generator().manual_seed(3))
    for name in ("gpt", "llama"):
        reference, model = reference_and(mesh, MODELS[name])
        for cuts in ([3, 4, 5, 6, 7], [1, 4], [5]):
            expected = reference(tokens)[:, [*(c - 1 for c in cuts), 7]]
            ours = decode_in_pieces(model, tokens, cuts)
            wrong[f"{name}, cut at {cuts}"] = differences({"logits": ours}, {"logits": expected}, rtol=2e-5)
        for kind, how in {
            "greedy": {"temperature": 0.0},
            "sampled": {"seed": 4, "top_k": 20, "top_p": 0.9},
            "stopped": {"temperature": 0.0, "stop": 5},
        }.items():
            expected = generate(reference, tokens[:, :3], 5, **how)  # type: ignore[arg-type]
            ours = generate(model, tokens[:, :3], 5, **how)  # type: ignore[arg-type]
            if not torch.equal(ours, expected):
                wrong[f"{name}, {kind}"] = (ours, expected)
    torch.manual_seed(9)
    wrong["unseeded"] = generate(model, tokens[:, :3], 5, temperature=3.0).tolist()
    return {case: faults for case, faults in wrong.items() if faults}


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), TP4_SP])
def test_decoding_with_caches_equals_one_process_without(ranks, tp, sp):
    found = ranks(tp, check_decoding, tp, sp)
    assert [rank.keys() for rank in found] == [{"unseeded"}] * tp
    assert all(rank == found[0] for rank in found), "all ranks sample the same tokens"

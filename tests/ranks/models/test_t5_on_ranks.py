"""T5 on 2 and 4 ranks against the same model on one: loss, logits, generated texts, all gradients.

Tolerance: fp32 with sums split over ranks, three times a layer: 2e-5 of the largest element of each tensor; of
queries that see one key, whose gradients are rounding alone, 5e-6.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron import ConfigError
from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.config.recompute_plan import RecomputePlan
from lightning_megatron.encoders.t5.answer import answer
from lightning_megatron.encoders.t5.config import T5Config
from lightning_megatron.encoders.t5.model import T5Model
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.parity import differences, load_whole, whole_gradients
from tests.t5 import inputs_of, labels_of

SMALL = T5Config(
    4, 32, 8, 61, 32, head_dim=6, ffn_hidden_size=48, vocab_multiple=4, relative_buckets=8, relative_distance=20
)
MODELS = {
    "tied, relu": SMALL,
    "untied, gated, smoothed": SMALL.replace(
        activation="geglu_tanh", tie_embeddings=False, label_smoothing=0.1, num_decoder_layers=1
    ),
}
SIZES = [(3, 16, 8, True), (3, 11, 5, True), (2, 5, 11, False), (1, 8, 1, False), (1, 1, 1, False)]


def check_t5(tp: int, sp: bool, recompute: Any, shard_saved: bool = False) -> dict[str, Any]:
    mesh = ParallelMesh.create(ParallelLayout(tp=tp, sequence_parallel=sp), torch.device("cpu"))
    wrong: dict[str, Any] = {}
    for name, config in MODELS.items():
        torch.manual_seed(2)
        reference = T5Model(config)
        model = T5Model(config, mesh, recompute=RecomputePlan(recompute, shard_saved=shard_saved))
        load_whole(model, dict(reference.named_parameters()), mesh)
        for *sizes, padded in SIZES:
            inputs = inputs_of(*sizes, padded=padded)
            outcomes: list[dict[str, Any]] = []
            for candidate, where in ((model, mesh), (reference, ParallelMesh.single())):
                candidate.zero_grad()
                loss = candidate(inputs, labels_of(inputs))
                loss.backward()
                with torch.no_grad():
                    logits = candidate(inputs)
                outcomes.append({"loss": loss, "logits": logits, **whole_gradients(candidate, where)})
            wrong[f"{name}, {sizes}"] = differences(*outcomes, rtol=2e-5, atol=5e-6)
            texts = [
                answer(each, inputs.tokens, 5, start=0, padding_mask=inputs.padding_mask, temperature=0.0)
                for each in (model, reference)
            ]
            if not torch.equal(*texts):
                wrong[f"{name}, {sizes}, text"] = texts
    return {case: faults for case, faults in wrong.items() if faults}


SLOW, GRID = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("tp", "sp", "recompute", "shard_saved"),
    [
        pytest.param(2, False, None, False, marks=SLOW),
        (2, True, None, False),
        pytest.param(2, True, "full", False, marks=SLOW),
        pytest.param(2, False, "full", True, marks=SLOW),
        pytest.param(2, True, "selective", False, marks=GRID),
        pytest.param(2, False, ("attention", "mlp"), False, marks=GRID),
        pytest.param(4, True, None, False, marks=GRID),
        pytest.param(4, False, None, False, marks=SLOW),
    ],
)
def test_loss_logits_texts_and_all_gradients_equal_one_process(
    ranks: Any, tp: int, sp: bool, recompute: Any, shard_saved: bool
) -> None:
    assert ranks(tp, check_t5, tp, sp, recompute, shard_saved) == [{}] * tp


def check_refusal() -> None:
    mesh = ParallelMesh.create(ParallelLayout(cp=2), torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"cp=2: T5's relative positions"):
        T5Model(SMALL, mesh)


def test_shared_sequences_are_refused(ranks: Any) -> None:
    ranks(2, check_refusal)

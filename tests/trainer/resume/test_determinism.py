"""Same seed, same bits; and which dropout masks agree between layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy, ParallelLayout
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 8}
SHAPE |= {"ffn_hidden_size": 48, "vocab_size": 50, "vocab_multiple": 1}


def train(
    tp: int, sequence_parallel: bool, dropout: tuple[float, float], precision: str = "32-true", seed: int = 11
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Eight steps; losses, gradient norms, this rank's final parameters."""
    seed_everything(seed, verbose=False)
    hidden, attention = dropout
    module: GPTModule = LlamaModule("llama-tiny", lr=3e-3, hidden_dropout=hidden, attention_dropout=attention, **SHAPE)
    tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(2)).repeat(8, 1)
    samples = [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]
    strategy = MegatronStrategy(tp=tp, sequence_parallel=sequence_parallel, micro_batch_size=2)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, precision=precision, max_steps=8, gradient_clip_val=1.0, logger=recorder)
    trainer.fit(module, DataLoader(samples, batch_size=4))  # type: ignore[arg-type]
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return recorder.series("train_loss"), recorder.series("grad_norm"), weights


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_runs_with_one_seed_are_bit_equal(ranks: Ranks, sequence_parallel: bool, precision: str) -> None:
    first = ranks(4, train, 2, sequence_parallel, (0.1, 0.1), precision)
    second = ranks(4, train, 2, sequence_parallel, (0.1, 0.1), precision)
    for (losses, norms, weights), (again, norms_again, weights_again) in zip(first, second, strict=True):
        assert losses == again
        assert norms == norms_again
        assert len(losses) == 8
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    other = ranks(4, train, 2, sequence_parallel, (0.1, 0.1), precision, 12)
    assert other[0][0] != first[0][0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_dropout_it_trains(ranks: Ranks, sequence_parallel: bool) -> None:
    losses, norms, _ = ranks(2, train, 2, sequence_parallel, (0.1, 0.1))[0]
    assert losses[-1] < losses[0] - 0.1
    assert all(0.1 < norm < 10 for norm in norms)


def test_attention_dropout_alone_agrees_with_and_without_sequence_parallelism(ranks: Ranks) -> None:
    # Attention is over the whole sequence on both sides, and each rank's heads draw from its own stream: same masks.
    plain = ranks(2, train, 2, False, (0.0, 0.3))[0]
    sharded = ranks(2, train, 2, True, (0.0, 0.3))[0]
    without = ranks(2, train, 2, False, (0.0, 0.0))[0]
    assert sharded[0] == pytest.approx(plain[0], rel=1e-5)
    assert sharded[1] == pytest.approx(plain[1], rel=1e-5)
    assert without[0] != pytest.approx(plain[0], rel=1e-3)  # the dropout is there


def test_hidden_dropout_draws_other_masks_under_sequence_parallelism(ranks: Ranks) -> None:
    # A rank draws only its shard's mask, from its own stream: another draw, of the same distribution.
    plain = ranks(2, train, 2, False, (0.3, 0.0))[0]
    sharded = ranks(2, train, 2, True, (0.3, 0.0))[0]
    assert sharded[0] != pytest.approx(plain[0], rel=1e-4)
    assert sharded[0] == pytest.approx(plain[0], rel=0.1)


def masks(sequence_parallel: bool) -> Tensor:
    """Ones after a dropout of one half, on a rank of tp = 2, in two draws."""
    mesh = ParallelMesh.create(ParallelLayout(tp=2), torch.device("cpu"))
    torch.manual_seed(4)
    mesh.rng.place(tp_rank=mesh.tp.rank)
    dropout = Dropout(0.5, mesh, sequence_parallel=sequence_parallel)
    return torch.stack([dropout(torch.ones(64, 3)), dropout(torch.ones(64, 3))])


def test_masks_agree_over_tp_outside_its_regions_and_differ_inside(ranks: Ranks) -> None:
    first, second = ranks(2, masks, False)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    first, second = ranks(2, masks, True)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])

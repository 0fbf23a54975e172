"""Gradients that are sent during the last backward, held against those that are sent after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48}


def weights(overlap: bool, tie: bool) -> dict[str, torch.Tensor]:
    """Main weights behind two steps of two micro-batches."""
    torch.manual_seed(0)
    module = LlamaModule("llama-tiny", vocab_size=50, head_dim=8, tie_embeddings=tie, lr=0.1, **SIZES)
    strategy = MegatronStrategy(micro_batch_size=1, overlap_grad_reduce=overlap, bucket_size=2000)
    trainer = quiet_trainer(strategy, precision="bf16-mixed", max_steps=2)
    tokens = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(1))
    rows = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return strategy.main_state_dict()


def largest_difference(tie: bool) -> float:
    """Between the weights of both."""
    sent_early, sent_late = weights(True, tie), weights(False, tie)
    return max(float((sent_early[name] - sent_late[name]).abs().max()) for name in sent_late)


@pytest.mark.parametrize("tie", [False, True])
def test_sums_in_fp32_do_not_depend_on_when_they_are_sent(ranks: Ranks, tie: bool) -> None:
    """The last micro-batch's products are added in fp32 as those before it, and not rounded to bf16 first."""
    assert ranks(2, largest_difference, tie) == [0.0, 0.0]

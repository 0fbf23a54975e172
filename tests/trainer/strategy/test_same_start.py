"""Models that a script builds before the processes have a common seed start from one rank's values, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import LlamaModule, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Any
TINY = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithHead(LlamaModule):
    def __init__(self) -> None:
        super().__init__("llama-tiny", vocab_size=32, max_position_embeddings=8, lr=1e-2, **TINY)
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.hidden(batch)
        return self.loss(batch, hidden) + self.head(hidden).square().mean()


def plain_job(strategy: str) -> list[Tensor]:
    torch.manual_seed(100 + dist.get_rank())  # a script without seed_everything
    module = Plain()
    data = DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=2)
    chosen: Any = MegatronStrategy() if strategy == "ours" else strategy
    quiet_trainer(chosen, max_steps=2).fit(module, data)
    return [p.detach().cpu().clone() for p in module.parameters()]


def head_job(layout: dict[str, int]) -> list[Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    module = WithHead()
    batch = {"tokens": torch.arange(8) % 32, "labels": torch.arange(1, 9) % 32}
    quiet_trainer(MegatronStrategy(**layout), max_steps=2).fit(module, DataLoader([batch] * 4, batch_size=2))
    return [p.detach().cpu().clone() for p in module.head.parameters()]


def test_replicas_start_with_the_first_ones_values_as_under_ddp(ranks: Ranks) -> None:
    ours, ddp = ranks(2, plain_job, "ours"), ranks(2, plain_job, "ddp")
    for rank in range(2):
        for mine, theirs in zip(ours[rank], ddp[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_copies_over_tensor_and_pipeline_ranks_start_alike(ranks: Ranks, layout: dict[str, int]) -> None:
    first, second = ranks(2, head_job, layout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""Every parameter that a step reads is waited for, however it is read: losses are those without overlap, bit for bit.

Gathers run when they are waited for, and the buckets are small, so a value that is read too early is an old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_megatron import BertModule, GPTModule, LoRA, MegatronStrategy, T5Module
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.families import TINY, TRAINED, VOCABULARY, our_config, tokens_of
from tests.late import late_gathers

Ranks = Callable[..., list[Any]]
STEPS, BATCH, LENGTH, WIDTH = 5, 4, 12, 8
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "micro_batch_size": 2},
    {"tp": 2, "micro_batch_size": 2},
    {"recompute": "full"},
    {"pp": 2, "vpp": 2, "pipeline_schedule": "interleaved", "micro_batch_size": 2},
]


def losses(module: LightningModule, samples: list[Any], overlap: bool, **layout: Any) -> list[float]:
    strategy = MegatronStrategy(bucket_size=500, overlap_param_gather=overlap, **layout)
    recorder = Recorder()
    trainer = quiet_trainer(strategy, max_steps=STEPS, logger=recorder)
    with late_gathers():
        trainer.fit(module, DataLoader(samples, batch_size=BATCH))
    return recorder.series("train_loss")


def both(make: Callable[[], LightningModule], samples: list[Any], **layout: Any) -> tuple[list[float], list[float]]:
    """Losses that waited for all parameters after each step, and those that waited as late as they could."""
    found = []
    for overlap in (False, True):
        seed_everything(3, verbose=False)
        found.append(losses(make(), samples, overlap, **layout))
    return found[0], found[1]


def check(ranks: Ranks, size: int, function: Callable[..., Any], *args: Any) -> None:
    for waited, overlapped in ranks(size, function, *args):
        assert len(waited) == STEPS
        assert overlapped == waited


# Our models


def text() -> list[dict[str, Tensor]]:
    rows = tokens_of(STEPS * BATCH * 4, LENGTH + 1)
    return [{"tokens": row[:-1], "labels": row[1:]} for row in rows]


def decoder(family: str, layout: dict[str, Any]) -> tuple[list[float], list[float]]:
    config = our_config(TINY[family], **TRAINED.get(family, {}))
    return both(lambda: GPTModule(config, lr=0.05), text(), **layout)


IN_THE_GATE = ("mixtral", "deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.gate) for family in IN_THE_GATE),
        "gpt2",
        "gpt_oss",
        "gemma3_text",
        "deepseek_v2",
    ],
)
def test_decoders_wait(ranks: Ranks, family: str) -> None:
    check(ranks, 2, decoder, family, {})


OFTEN = ("mixtral", "qwen3_moe")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=pytest.mark.slow if family in OFTEN else pytest.mark.exhaustive)
        for family, layout in [
            *((family, layout) for family in ("llama", "mixtral", "deepseek_v3") for layout in LAYOUTS),
            ("qwen3_moe", {"ep": 2, "micro_batch_size": 2}),
        ]
    ],
    ids=str,
)
def test_decoders_wait_in_layouts(ranks: Ranks, family: str, layout: dict[str, Any]) -> None:
    check(ranks, 4, decoder, family, layout)


def dispatched(options: dict[str, Any]) -> tuple[list[float], list[float]]:
    config = our_config(TINY["mixtral"], **options)
    return both(lambda: GPTModule(config, lr=0.05), text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"moe_token_dispatcher": "allgather"},
        pytest.param({"moe_capacity_factor": 1.0, "moe_pad_to_capacity": True}, marks=pytest.mark.gate),
        {"moe_shared_expert_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.1},
    ],
    ids=str,
)
def test_experts_wait_with_every_dispatcher(ranks: Ranks, options: dict[str, Any]) -> None:
    check(ranks, 2, dispatched, options)


def adapted(family: str, dora: bool) -> tuple[list[float], list[float]]:
    config = our_config(TINY[family])
    lora = LoRA(rank=4, alpha=8.0, targets=("all-linear", "embed_tokens", "lm_head"), dora=dora)
    return both(lambda: GPTModule(config, lora=lora, lr=0.05), text())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dora"), [("llama", True), pytest.param("mixtral", False, marks=pytest.mark.gate)])
def test_adapters_wait(ranks: Ranks, family: str, dora: bool) -> None:
    check(ranks, 2, adapted, family, dora)


def bert() -> tuple[list[float], list[float]]:
    rows = tokens_of(STEPS * BATCH * 2, LENGTH)
    batch = [{"tokens": row, "labels": row, "loss_mask": (row % 3 == 0).float()} for row in rows]
    options = SIZES | {"max_position_embeddings": 16, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    for index, each in enumerate(batch):
        each["is_random"] = torch.tensor(index % 2)
    return both(lambda: BertModule("bert-tiny", lr=0.05, **options), batch)


def t5() -> tuple[list[float], list[float]]:
    rows = tokens_of(STEPS * BATCH * 2, LENGTH + 8)
    batch = [{"tokens": row[:LENGTH], "decoder_tokens": row[LENGTH:-1], "labels": row[LENGTH + 1 :]} for row in rows]
    options = SIZES | {"num_decoder_layers": 2, "head_dim": 6}
    return both(lambda: T5Module("t5-tiny", lr=0.05, hidden_dropout=0.0, attention_dropout=0.0, **options), batch)


@pytest.mark.slow
@pytest.mark.parametrize("function", [bert, pytest.param(t5, marks=pytest.mark.gate)])
def test_encoders_wait(ranks: Ranks, function: Callable[..., Any]) -> None:
    check(ranks, 2, function)


# Modules of users


class ReadsChild(nn.Module):
    """Reads a child's weight, and calls a method of another one, in front of a child that it calls."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def scaled(self, x: Tensor) -> Tensor:
            return x * self.weight

    def __init__(self) -> None:
        super().__init__()
        self.read, self.scale, self.called = nn.Linear(WIDTH, WIDTH), self.Scale(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.called(self.scale.scaled(F.linear(x, self.read.weight, self.read.bias)).tanh())
        return hidden


class Attention(nn.Module):
    """torch's attention, which reads the weight of its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), need_weights=False)[0]
        return out.squeeze(1)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "reads child": ReadsChild,
    "attention": Attention,
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH),
}


class User(LightningModule):
    """A stack of one kind of module, and parameters of the root."""

    def __init__(self, kind: str, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.stack = nn.ModuleList(KINDS[kind]() for _ in range(3))
        self.slope, self.unread = nn.Parameter(torch.ones(1)), nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor) -> Tensor:
        for layer in self.stack:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return (self.slope * x + self.unread.weight).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        for again in range(2):
            optimizer.zero_grad()
            self.manual_backward(loss if not again else self.loss(batch))
            optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def user(kind: str, manual: bool) -> tuple[list[float], list[float]]:
    samples = list(torch.randn(STEPS * BATCH * 2, WIDTH, generator=torch.Generator().manual_seed(0)))
    return both(lambda: User(kind, manual), samples)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_of_users_wait(ranks: Ranks, kind: str) -> None:
    check(ranks, 2, user, kind, False)


def test_two_steps_in_a_training_step_wait(ranks: Ranks) -> None:
    # max_steps counts both steps of an optimizer
    for waited, overlapped in ranks(2, user, "reads child", True):
        assert len(waited) >= STEPS // 2
        assert overlapped == waited

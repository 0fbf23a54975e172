"""Losses that are sums over tokens: every layout against one process that takes the mean over the whole batch.

Samples keep between none and all of their tokens, so that a mean of means over micro-batches, replicas or accumulated
batches would be wrong: by 2 % in the loss, and by 6 to 65 % in the norm of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, seed_everything
from parity import Curve
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY, SEED, CLIP = 10, 8, 12, 61, 5, 1.0


@dataclass(frozen=True)
class Run:
    """A layout, and how it comes to the same global batch."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    accumulate: int = 1
    schedule: str | None = None
    distributed_optimizer: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.dp // self.accumulate

    def strategy(self) -> MegatronStrategy:
        return MegatronStrategy(
            tp=self.tp,
            pp=self.pp,
            pipeline_schedule=self.schedule,  # type: ignore[arg-type]
            micro_batch_size=self.batch_size // self.micro_batches,
            distributed_optimizer=self.distributed_optimizer,
            bucket_size=5000,
        )


class Sums(GPTModule):
    """Returns sums, and keeps what Lightning shows for each batch: its loss, and its number of tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__("gpt-tiny", **options)
        self.shown: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["loss_mask"].sum()
        return {"loss": self.loss(batch) * tokens, "num_tokens": tokens}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning shows each accumulated batch's share of the step.
        loss = float(outputs["loss"]) * self.trainer.accumulate_grad_batches
        self.shown.append((loss, float(outputs["num_tokens"])))

    def means(self, accumulate: int) -> list[float]:
        """The loss of each step."""
        windows = [self.shown[i : i + accumulate] for i in range(0, len(self.shown), accumulate)]
        return [sum(loss * n for loss, n in window) / sum(n for _, n in window) for window in windows]


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH + 1), generator=generator)
    kept = torch.randint(LENGTH + 1, (len(tokens), 1), generator=generator)
    masks = (torch.arange(LENGTH) < kept).float()
    return [{"tokens": row[:-1], "labels": row[1:], "loss_mask": m} for row, m in zip(tokens, masks, strict=True)]


def trained(module: GPTModule, run: Run) -> Recorder:
    recorder = Recorder()
    trainer = quiet_trainer(
        run.strategy(),
        max_epochs=1,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=run.accumulate,
        logger=recorder,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=run.batch_size, shuffle=True))  # type: ignore[arg-type]
    return recorder


def sizes() -> dict[str, Any]:
    seed_everything(SEED, verbose=False)
    # Large weights, so that gradients are above the clipping norm.
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    return {"lr": 1e-3, "max_position_embeddings": 16, "vocab_multiple": 4, "init_std": 0.1, **shape}


def whole_batches() -> Curve:
    """One process, one batch a step, and a loss that is the mean over its tokens."""
    recorder = trained(GPTModule("gpt-tiny", **sizes()), Run())
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def curves(runs: Sequence[Run]) -> list[Curve]:
    found = []
    for run in runs:
        module = Sums(**sizes())
        recorder = trained(module, run)
        found.append(Curve(module.means(run.accumulate), recorder.series("grad_norm")))
    return found


RUNS = [
    Run(),
    Run(micro_batches=4),
    Run(accumulate=2),
    Run(micro_batches=2, accumulate=2),
    Run(dp=2),
    Run(dp=2, micro_batches=4),
    Run(dp=2, accumulate=2, distributed_optimizer=False),
    Run(pp=2),
    Run(pp=2, micro_batches=4),
    Run(pp=2, micro_batches=2, accumulate=2, schedule="zero-bubble"),
    Run(tp=2),
    Run(tp=2, micro_batches=4),
    Run(dp=2, pp=2, micro_batches=2, accumulate=2),
    Run(dp=2, tp=2, micro_batches=2),
]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(n, marks=pytest.mark.gate if n <= 2 else ()) for n in {run.world_size for run in RUNS}],
)
@pytest.mark.slow
def test_every_layout_has_the_mean_over_all_tokens(ranks: Ranks, world_size: int, record_property: Any) -> None:
    (expected,) = ranks(1, whole_batches)
    assert min(expected.norms) > CLIP, "clipping is meant to happen"
    runs = [run for run in RUNS if run.world_size == world_size]
    found = {
        (run, rank): curve.deviation(expected)
        for rank, mine in enumerate(ranks(world_size, curves, runs))
        for run, curve in zip(runs, mine, strict=True)
    }
    record_property("worst_relative_deviation", max(found.values()))
    print(f"worst relative deviation {max(found.values()):.1e} over {len(runs)} runs")
    assert max(found.values()) <= 1e-5, found


# Where there is little or nothing to count


class Toy(LightningModule):
    """One weight, whose gradient in a batch is the sum of what the batch keeps: entries that are not zero."""

    sums_over_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[float, float]] = []

    def counts(self, batch_idx: int) -> bool:
        return True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.weight * batch).sum() + batch.sum()
        return {"loss": loss, "num_tokens": int((batch != 0).sum())} if self.counts(batch_idx) else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), float(self.weight.detach())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(
    module: LightningModule, data: Tensor, batch_size: int = 2, micro_batch_size: int | None = None, **o: Any
) -> None:
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=micro_batch_size), max_epochs=1, **o)
    trainer.fit(module, DataLoader(data, batch_size=batch_size))  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_a_batch_without_tokens_moves_nothing(micro_batch_size: int | None) -> None:
    module = Toy()
    data = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 2.0], [6.0, 0.0]])
    fit(module, data, micro_batch_size=micro_batch_size, use_distributed_sampler=False)
    # loss, then weight, which the mean of what is kept has been taken from
    assert module.seen == [(3.0, -3.0), (0.0, -3.0), (pytest.approx((9 - 27) / 3), -6.0)]


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_an_epoch_that_ends_in_a_shorter_window_has_its_mean_too(micro_batch_size: int | None) -> None:
    module = Toy()
    data = torch.tensor([[3.0, 0.0], [5.0, 7.0], [0.0, 0.0], [1.0, 3.0], [6.0, 8.0], [4.0, 0.0]])
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
    fit(module, data, micro_batch_size=micro_batch_size, **options)
    assert [weight for _, weight in module.seen] == pytest.approx([0.0, -19 / 5, -19 / 5 - 18 / 3])


def test_accumulated_batches_that_differ_are_refused() -> None:
    class Mixed(Toy):
        def counts(self, batch_idx: int) -> bool:
            return batch_idx == 0

    with pytest.raises(MisconfigurationException, match="for some of the batches or micro-batches"):
        fit(Mixed(), torch.ones(4, 1), accumulate_grad_batches=2)


def test_under_manual_optimization_a_number_of_tokens_is_the_users_own() -> None:
    class Manual(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(output["loss"] / output["num_tokens"])
            optimizer.step()
            return {**output, "loss": output["loss"].detach()}

    module = Manual()
    fit(module, torch.tensor([[3.0, 0.0], [5.0, 7.0]]), use_distributed_sampler=False)
    assert module.seen == [(15.0, -5.0)]

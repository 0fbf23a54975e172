"""``loss_reduction="token"`` over packed documents: every layout and cut against one process.

One process takes one batch a step and writes the mean out: the sum over sequences of their mean times their number of
tokens, by the number of all. Sequences keep between none and all of their tokens, so that any mean of means would be
wrong. Experts' losses are those of a sequence, weighted with its tokens. Sums run in another order elsewhere, and Adam
amplifies what that changes from step to step: the first step holds 1e-6, ten hold 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything
from parity import Curve
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import BertModule, GPTModule, LlamaModule, MegatronStrategy, MixtralModule
from lightning_megatron.device import CPU
from lightning_megatron.errors import ConfigError
from lightning_megatron.lightning.step.per_token_loss import check_stages_can_count
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="documents in a batch are refused on a Gaudi")

Ranks = Callable[..., list[Any]]
STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY, SEED, CLIP = 10, 8, 16, 61, 5, 1.0
SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SHAPE |= {"max_position_embeddings": LENGTH, "init_std": 0.2, "vocab_multiple": 4, "lr": 1e-3, "eps": 1e-5}
FAMILIES: dict[str, tuple[type[GPTModule], str, dict[str, Any]]] = {
    "gpt": (GPTModule, "gpt-tiny", {}),
    "llama": (LlamaModule, "llama-tiny", {"num_query_groups": 2, "ffn_hidden_size": 24}),
    "mixtral": (
        MixtralModule,
        "mixtral-tiny",
        {"num_query_groups": 2, "ffn_hidden_size": 24, "num_experts": 4, "moe_aux_loss_coeff": 0.3}
        | {"moe_load_balancing": "seq_aux_loss", "moe_z_loss_coeff": 0.01},
    ),
}


@dataclass(frozen=True)
class Run:
    """A layout, and how it comes to the same global batch."""

    micro_batch_size: int = 1
    dp: int = 1
    accumulate: int = 1
    sizes: tuple[tuple[str, Any], ...] = ()
    distributed_optimizer: bool = True

    @property
    def world_size(self) -> int:
        found = self.dp
        for name, size in self.sizes:
            found *= size if name in ("tp", "pp", "cp") else 1
        return found

    def strategy(self) -> MegatronStrategy:
        return MegatronStrategy(
            micro_batch_size=self.micro_batch_size,
            distributed_optimizer=self.distributed_optimizer,
            bucket_size=5000,
            **dict(self.sizes),
        )


def of(micro_batch_size: int = 1, dp: int = 1, accumulate: int = 1, zero: bool = True, **sizes: Any) -> Run:
    return Run(micro_batch_size, dp, accumulate, tuple(sizes.items()), zero)


RUNS = [
    of(8),
    of(),
    of(2, accumulate=2),
    of(dp=2),
    of(2, dp=2, accumulate=2, zero=False),
    of(tp=2),
    of(2, tp=2, dp=2),
    of(pp=2),
    of(2, pp=2, accumulate=2, pipeline_schedule="zero-bubble"),
    of(pp=2, vpp=2, dp=2),
    of(2, cp=2),
    of(cp=2, cp_comm_type="all_gather", dp=2),
    of(4, cp=2, cp_comm_type="a2a", recompute="full"),
    of(cp=2, pp=2, accumulate=2),
]
# A micro-batch of one sequence: what balances experts is then a loss of sequences, however a batch is cut.
WITH_EXPERTS = [
    of(),
    of(accumulate=2),
    of(dp=2),
    of(dp=2, accumulate=2, zero=False),
    of(dp=2, ep=2),
    of(tp=2),
    of(tp=2, ep=2, etp=1, dp=2),
    of(pp=2),
    of(pp=2, accumulate=2, pipeline_schedule="zero-bubble"),
    of(pp=2, vpp=2, dp=2),
    of(cp=2, ep=2),
    of(cp=2, cp_comm_type="all_gather", dp=2),
    of(cp=2, cp_comm_type="a2a", recompute="full"),
    of(cp=2, pp=2, ep=2, accumulate=2),
]


def samples() -> list[dict[str, Tensor]]:
    """Sequences of a few documents, most with padding, that keep between none and all of their tokens."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(STEPS * GLOBAL_BATCH):
        text = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        bounds = torch.rand(LENGTH, generator=generator) < 0.2
        segments = bounds.cumsum(0) + 1
        segments[LENGTH - number % 5 :] = 0
        kept = torch.randint(LENGTH + 1, (), generator=generator)
        mask = (torch.arange(LENGTH) < kept).float()
        found.append({"tokens": text[:-1], "labels": text[1:], "loss_mask": mask, "segment_ids": segments})
    return found


def module_of(family: str, kind: type[GPTModule] | None = None, **options: Any) -> GPTModule:
    seed_everything(SEED, verbose=False)
    own, preset, sizes = FAMILIES[family]
    return (kind or own)(preset, **SHAPE | sizes | options)


class WrittenOut(GPTModule):
    """The mean over tokens, from the means of sequences."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counts = (batch["loss_mask"] * (batch["segment_ids"] != 0)).sum(1)
        rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(counts))]
        loss = torch.stack([self.loss(row) * n for row, n in zip(rows, counts, strict=True)]).sum() / counts.sum()
        self.log("train_loss", loss)
        return loss


def fit(module: GPTModule, run: Run) -> Curve:
    recorder = Recorder()
    how = {"gradient_clip_val": CLIP, "accumulate_grad_batches": run.accumulate, "logger": recorder}
    trainer = quiet_trainer(run.strategy(), max_epochs=1, **how)
    size = GLOBAL_BATCH // run.dp // run.accumulate
    trainer.fit(module, DataLoader(samples(), batch_size=size, shuffle=True))  # type: ignore[arg-type]
    return Curve(recorder.series("train_loss"), recorder.series("grad_norm"))


def expected(family: str) -> Curve:
    return fit(module_of(family, WrittenOut), of(GLOBAL_BATCH))


def curves(family: str, runs: Sequence[Run]) -> list[Curve]:
    return [fit(module_of(family, loss_reduction="token"), run) for run in runs]


def check(ranks: Ranks, family: str, runs: Sequence[Run]) -> None:
    (right,) = ranks(1, expected, family)
    assert min(right.norms) > CLIP, "clipping is meant to happen"
    for run in runs:
        for found in ranks(run.world_size, curves, family, [run]):
            # A step's line in the log is that of its last batch.
            losses = found[0].losses if run.accumulate == 1 else right.losses
            mine = Curve(losses, found[0].norms)
            pairs = list(zip(mine.losses + mine.norms, right.losses + right.norms, strict=True))
            off = [abs(a - b) / b for a, b in pairs]
            print(f"{family} {run}: {max(off[0], off[STEPS]):.1e} in the first step, {max(off):.1e} in all")
            assert max(off[0], off[STEPS]) <= 1e-6, run
            assert max(off) <= 1e-5, run


PAIRS = [("llama", RUNS[2]), ("mixtral", WITH_EXPERTS[13]), ("gpt", RUNS[9])]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "run"), PAIRS, ids=["llama", "mixtral", "gpt"])
def test_a_layout_has_the_mean_over_all_tokens(ranks: Ranks, family: str, run: Run) -> None:
    check(ranks, family, [run])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_has_the_mean_over_all_tokens(ranks: Ranks, family: str) -> None:
    check(ranks, family, WITH_EXPERTS if family == "mixtral" else RUNS)


def validated(family: str, run: Run) -> dict[str, float]:
    """``val_loss`` of two dataloaders of different lengths, and ``test_loss`` in two passes."""
    module = module_of(family, loss_reduction="token")
    trainer = quiet_trainer(run.strategy())
    size = GLOBAL_BATCH // run.dp
    loaders = [DataLoader(some, batch_size=size) for some in (samples()[:24], samples()[24:40])]  # type: ignore[arg-type]
    trainer.validate(module, loaders, verbose=False)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for _ in range(2):
        trainer.test(module, loaders[0], verbose=False)
        found[f"test_loss {len(found)}"] = float(trainer.callback_metrics["test_loss"])
    return found


def mean_over_tokens(family: str, some: list[dict[str, Tensor]]) -> float:
    module = module_of(family)
    module.configure_model()
    batch = torch.utils.data.default_collate(some)
    weights = batch["loss_mask"] * (batch["segment_ids"] != 0)
    with torch.no_grad():
        return float((module.token_losses(batch) * weights).sum() / weights.sum())


@pytest.mark.parametrize(
    "run", [of(8), of(2, dp=2), of(2, tp=2), of(2, pp=2), of(pp=2, vpp=2, dp=2), of(cp=2)], ids=str
)
def test_an_evaluation_has_the_mean_over_all_tokens(ranks: Ranks, run: Run) -> None:
    first, second = (mean_over_tokens("llama", some) for some in (samples()[:24], samples()[24:40]))
    expected = {"val_loss/dataloader_idx_0": first, "val_loss/dataloader_idx_1": second}
    expected |= {"test_loss 2": first, "test_loss 3": first}
    for found in ranks(run.world_size, validated, "llama", run):
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_step_gives_sums_and_their_number() -> None:
    module = module_of("llama", loss_reduction="token")
    batch = torch.utils.data.default_collate(samples()[:4])
    output = module.training_step(batch, 0)
    weights = batch["loss_mask"] * (batch["segment_ids"] != 0)
    assert output["num_tokens"] == weights.sum()
    torch.testing.assert_close(output["loss"], (module.token_losses(batch) * weights).sum())
    assert module.hparams["loss_reduction"] == "token"


def test_other_strategies_and_families_are_refused() -> None:
    module = module_of("llama", loss_reduction="token")
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **options)
    with pytest.raises(ConfigError, match="loss_reduction='token': SingleDeviceStrategy does not know the tokens"):
        trainer.fit(module, DataLoader(samples(), batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss_reduction='token': the loss of a BertModule is no single mean"):
        BertModule("bert-tiny", loss_reduction="token")


def test_sums_of_ones_own_beside_experts_in_a_pipeline_need_to_be_told_of_beforehand() -> None:
    batch = torch.utils.data.default_collate(samples()[:2])
    with pytest.raises(MisconfigurationException, match=r"let the module's num_tokens\(batch\) say it beforehand"):
        check_stages_can_count(module_of("mixtral"), 2, batch)
    check_stages_can_count(module_of("mixtral", loss_reduction="token"), 2, batch)
    check_stages_can_count(module_of("mixtral"), 1, batch)

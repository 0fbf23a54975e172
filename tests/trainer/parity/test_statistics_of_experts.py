"""What experts count in a training step: the same without padding, and the same where a forward is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ExpertTelemetry, MegatronStrategy, MixtralModule
from lightning_megatron.moe.router import Router
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

Ranks = Callable[..., list[Any]]
STEPS, BATCH, LENGTH, PADDED = 3, 4, 8, 16
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2}
SIZES |= {"ffn_hidden_size": 16, "vocab_size": 40, "vocab_multiple": 4, "num_experts": 4, "init_std": 0.2}
SIZES |= {"moe_aux_loss_coeff": 0.3, "lr": 1e-2, "eps": 1e-5}
GLOBAL: dict[str, Any] = {"moe_load_balancing": "global_aux_loss"}
SEQUENCE: dict[str, Any] = {"moe_load_balancing": "seq_aux_loss", "moe_z_loss_coeff": 0.1}
BIAS: dict[str, Any] = {"moe_router_score": "sigmoid", "moe_expert_bias_update_rate": 0.01}


def samples(padding: int) -> list[dict[str, Tensor]]:
    """Texts with a masked prompt, and as much padding behind them."""
    text = torch.randint(1, 40, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(LENGTH) >= 2).float()
    rows = [{"tokens": row[:-1], "labels": row[1:], "loss_mask": mask} for row in text]
    return [{key: F.pad(value, (0, padding)) for key, value in row.items()} for row in rows]


class OwnHead(MixtralModule):
    """A loss from hidden states."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, self.hidden(batch))


class Pairs(MixtralModule):
    """Two calls of the model in a step, on texts that balance differently."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.loss({**batch, "tokens": batch["tokens"] % 5})


def trained(
    kind: type[MixtralModule], padding: int, fields: dict[str, Any], layout: dict[str, Any], **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and biases after training, and all that was logged."""
    seed_everything(2, verbose=False)
    recorder = Recorder()
    strategy = MegatronStrategy(**{"micro_batch_size": 1} | layout)
    watch = ExpertTelemetry(every_n_steps=1, table=False)
    trainer = quiet_trainer(strategy, max_epochs=1, logger=recorder, callbacks=[watch], **options)
    module = kind("mixtral-tiny", **SIZES | fields)
    trainer.fit(module, DataLoader(samples(padding), batch_size=BATCH))  # type: ignore[arg-type]
    assert any(isinstance(part, Router) for part in module.modules())
    logged = [value for row in recorder.rows for name, value in sorted(row.items()) if "time" not in name]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, logged


def difference(kind: type[MixtralModule], fields: dict[str, Any], *ways: tuple[int, dict[str, Any]]) -> float:
    """Largest difference between two trainings, each with its padding and layout."""
    (weights, logged), (others, seen) = (trained(kind, padding, fields, layout) for padding, layout in ways)
    assert logged == pytest.approx(seen, rel=1e-4)
    return max(float((value - others[name]).abs().max()) for name, value in weights.items())


def padded(kind: type[MixtralModule], fields: dict[str, Any], layout: dict[str, Any]) -> float:
    return difference(kind, fields, (0, layout), (PADDED - LENGTH, layout))


ALONE: dict[str, tuple[type[MixtralModule], dict[str, Any], dict[str, Any]]] = {
    "aux_loss": (MixtralModule, {"moe_token_dispatcher": "allgather"}, {"micro_batch_size": 2}),
    "seq_aux_loss": (MixtralModule, SEQUENCE, {"recompute": "full"}),
    "global_aux_loss": (MixtralModule, GLOBAL, {"recompute": ["mlp"]}),
    "bias": (MixtralModule, BIAS, {}),
    "hidden": (OwnHead, SEQUENCE, {}),
}


@pytest.mark.parametrize("case", ALONE)
def test_training_is_as_without_padding(case: str) -> None:
    assert padded(*ALONE[case]) < 2e-5


LAYOUTS: dict[str, tuple[type[MixtralModule], dict[str, Any], dict[str, Any]]] = {
    "tp": (MixtralModule, SEQUENCE, {"tp": 2, "ep": 2, "etp": 1}),
    "cp": (MixtralModule, BIAS, {"cp": 2}),
    "pp": (OwnHead, BIAS | SEQUENCE, {"pp": 2, "recompute": "full"}),
    "dp": (MixtralModule, GLOBAL, {"ep": 2}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_trains_as_without_padding(ranks: Ranks, case: str) -> None:
    assert max(ranks(2, padded, *LAYOUTS[case])) < 2e-5


def again(layout: dict[str, Any], way: dict[str, Any]) -> float:
    return difference(Pairs, GLOBAL, (0, layout), (0, layout | way))


@pytest.mark.parametrize("way", [{"recompute": "full"}, {"recompute": ["mlp"]}], ids=str)
@pytest.mark.parametrize("layout", [{"micro_batch_size": 4}, {"micro_batch_size": 2}], ids=str)
def test_two_calls_in_a_step_are_balanced_as_without_recomputation(layout: dict[str, Any], way: dict[str, Any]) -> None:
    assert again(layout, way) == 0.0


@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}], ids=str)
def test_so_they_are_on_every_layout(ranks: Ranks, layout: dict[str, Any]) -> None:
    assert ranks(2, again, layout, {"recompute": "full"}) == [0.0, 0.0]

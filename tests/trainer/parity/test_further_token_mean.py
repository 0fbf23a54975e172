"""Multi-token prediction with ``loss_reduction="token"``: one mean over tokens, however a step is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

Ranks = Callable[..., list[Any]]
STEPS, ROWS, LENGTH, WEIGHT = 2, 4, 16, 0.7
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
SIZES |= {"vocab_size": 64, "max_position_embeddings": LENGTH, "vocab_multiple": 4, "init_std": 0.2}
SIZES |= {"norm": "rmsnorm", "activation": "swiglu", "position_embedding": "rope", "add_bias_linear": False}
SIZES |= {"mtp_num_layers": 2, "mtp_loss_scaling_factor": WEIGHT}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_load_balancing": "none", "moe_aux_loss_coeff": 0.0}
NAMES = ("train_loss", "mtp_1_loss", "mtp_2_loss", "grad_norm")


def samples(packed: bool = False) -> list[dict[str, Tensor]]:
    """Rows with 1 to 14 tokens that count: of each, one less is predicted one place further ahead."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(STEPS * ROWS):
        row = torch.randint(64, (LENGTH + 1,), generator=generator)
        mask = (torch.arange(LENGTH) < (1, 14, 2, 5)[number % ROWS]).float()
        found.append({"tokens": row[:-1], "labels": row[1:], "loss_mask": mask})
        if packed:
            found[-1]["segment_ids"] = 1 + (torch.arange(LENGTH) >= 3 + number % 5).long()
    return found


def module_of(fields: dict[str, Any]) -> GPTModule:
    seed_everything(3, verbose=False)
    return GPTModule(SIZES | fields, lr=1e-3, eps=1e-5, loss_reduction="token")


def logged(
    layout: dict[str, Any], fields: dict[str, Any] | None = None, packed: bool = False, dp: int = 1, accumulate: int = 1
) -> dict[str, list[float]]:
    module, recorder = module_of(fields or {}), Recorder()
    strategy = MegatronStrategy(**layout)
    trainer = quiet_trainer(strategy, max_epochs=1, logger=recorder, accumulate_grad_batches=accumulate)
    size = ROWS // dp // accumulate
    trainer.fit(module, DataLoader(samples(packed), batch_size=size, shuffle=True))  # type: ignore[arg-type]
    return {name: recorder.series(name) for name in NAMES}


def skip_where_documents_are_refused(packed: bool) -> None:
    if packed and kind_in_tests() is not CPU:
        pytest.skip("documents in a batch are refused on a Gaudi")


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize(("fields", "packed"), [({}, False), ({}, True), (EXPERTS, False)])
def test_micro_batches_change_nothing(micro_batch_size: int, fields: dict[str, Any], packed: bool) -> None:
    skip_where_documents_are_refused(packed)
    whole, cut = (logged({"micro_batch_size": size}, fields, packed) for size in (ROWS, micro_batch_size))
    for name in NAMES:
        assert cut[name] == pytest.approx(whole[name], rel=1e-5), name


def test_accumulated_batches_change_nothing() -> None:
    """The line of a step shows its last batch."""
    whole, cut = logged({}), logged({"micro_batch_size": 1}, accumulate=2)
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)


LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "dp": ({"micro_batch_size": 1}, 2),
    "pp": ({"pp": 2, "micro_batch_size": 2}, 1),
    "cp": ({"cp": 2, "micro_batch_size": 1, "recompute": "full"}, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_change_nothing(ranks: Ranks, name: str) -> None:
    """In the first step: later ones follow weights that differ by rounding."""
    layout, dp = LAYOUTS[name]
    whole = logged({})
    for found in ranks(2, logged, layout, None, False, dp):
        for metric in NAMES:
            assert found[metric] == pytest.approx(whole[metric], rel=1e-5), metric


@pytest.mark.parametrize("packed", [False, True])
def test_the_step_is_that_of_the_report(packed: bool) -> None:
    """Against DeepSeek-V3's formula (2412.19437, section 2.2): sums of losses, all divided by the T of the main one."""
    module = module_of({"mtp_num_layers": 1})
    module.configure_model()
    model, params = module.train().model, [*module.parameters()]
    assert model is not None
    batch = torch.utils.data.default_collate(samples(packed)[:ROWS])
    mask, segments = batch["loss_mask"], batch.get("segment_ids", torch.ones(ROWS, LENGTH))
    output = module.training_step(batch, 0)
    count = (mask[:, 1:] * (segments[:, 1:] == segments[:, :-1])).sum()
    torch.testing.assert_close(output["further_sums"], torch.stack((model.mtp_losses[0] * count, count))[None])

    given = {key: batch[key] for key in ("tokens", "labels", "loss_mask")} | {"documents": module._documents(batch)}
    both = torch.autograd.grad(model(**given), params)  # of the mean, and of a mean over the further tokens
    model.config = model.config.replace(mtp_loss_scaling_factor=0.0)
    alone = torch.autograd.grad(model(**given), params)
    ours = torch.autograd.grad(output["loss"] / output["num_tokens"], params)
    for mine, main, sum_of_means in zip(ours, alone, both, strict=True):
        torch.testing.assert_close(mine, main + (sum_of_means - main) * count / mask.sum(), rtol=1e-4, atol=1e-6)

"""A rehearsed training of adapters: what is kept of frozen and of trained weights, and a peak below the whole's."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer

from lightning_megatron import GPTModule, LoRA, MegatronDataModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import kind_in_tests
from lightning_megatron.tools.rehearsal.rehearse import rehearse
from lightning_megatron.tools.rehearsal.result import Rehearsal

pytestmark = pytest.mark.skipif(kind_in_tests() is not CPU, reason="what is rehearsed is a run on a CPU")


def rehearsed(preset: str, lora: LoRA | None, **layout: int) -> Rehearsal:
    strategy = MegatronStrategy(micro_batch_size=1, **layout)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, precision="bf16-mixed", logger=False)
    data = MegatronDataModule("nothing_is_read", seq_length=64, batch_size=2)
    return rehearse(trainer, GPTModule(preset, num_layers=2, lora=lora), data, rank=0)


@pytest.mark.parametrize(
    ("preset", "lora", "layout"),
    [
        pytest.param("llama-tiny", LoRA(rank=4), {"tp": 2}, marks=pytest.mark.slow),
        ("llama-tiny", LoRA(rank=4, dora=True), {"tp": 2}),
        ("mixtral-tiny", LoRA(rank=4), {"ep": 2}),
        ("llama-tiny", LoRA(rank=4, targets=("embed_tokens", "lm_head")), {"pp": 2}),
    ],
)
def test_only_adapters_have_gradients_and_moments(preset: str, lora: LoRA, layout: dict[str, int]) -> None:
    found, whole = rehearsed(preset, lora, **layout), rehearsed(preset, None, **layout)
    kept, all_of_it = found.after_step_by_cause, whole.after_step_by_cause
    assert kept["parameters"] > all_of_it["parameters"]  # bf16, frozen and trained
    assert kept["gradients"] < 0.2 * all_of_it["gradients"]
    assert kept["gradients"] >= 2 * (kept["parameters"] - all_of_it["parameters"])  # fp32, with padding of buckets
    assert kept["optimizer state"] < 0.2 * all_of_it["optimizer state"]
    assert found.peak < 0.7 * whole.peak

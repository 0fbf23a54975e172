"""Training on CUDA and through NCCL: losses as on CPUs in every layout, by the card's own kernels.

Needs a card: ``pytest -p lightning_megatron.testing.one_card --one-card tests/cuda``. Ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronPrecision, MegatronStrategy, MixtralModule
from lightning_megatron.checkpoint import verify
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.testing import one_card
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

pytestmark = pytest.mark.skipif(not one_card.enabled(), reason="needs a CUDA card and --one-card")

Ranks = Callable[..., list[Any]]
STEPS = 6
MODULES: dict[str, type[GPTModule]] = {"gpt": GPTModule, "llama": LlamaModule, "mixtral": MixtralModule}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": ("gpt", 1, {}),
    "gpt-tp2-cp2": ("gpt", 4, {"tp": 2, "cp": 2}),
    "llama": ("llama", 1, {}),
    "llama-dp2": ("llama", 2, {}),
    "llama-dp2-whole": ("llama", 2, {"distributed_optimizer": False}),
    "llama-tp2-sp": ("llama", 2, {"tp": 2, "sequence_parallel": True}),
    "llama-pp2": ("llama", 2, {"pp": 2}),
    "llama-pp2-vpp2": ("llama", 2, {"pp": 2, "vpp": 2}),
    "llama-cp2": ("llama", 2, {"cp": 2}),
    "llama-tp2-pp2-dp2": ("llama", 8, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "mixtral": ("mixtral", 1, {}),
    "mixtral-ep2": ("mixtral", 2, {"ep": 2}),
    "mixtral-tp2-ep2-pp2": ("mixtral", 8, {"tp": 2, "pp": 2, "ep": 2}),
}
CLOSE = {"32-true": 1e-5, "bf16-mixed": 1.5e-2}


def module_of(family: str, **options: Any) -> GPTModule:
    """A tiny model, the same on every call."""
    seed_everything(5, verbose=False)
    sizes: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"vocab_size": 61, "ffn_hidden_size": 128, "init_std": 0.1, "vocab_multiple": 4}
    if family == "gpt":
        del sizes["num_query_groups"]
    if family == "mixtral":
        sizes |= {"num_experts": 4, "moe_token_dispatcher": "allgather"}
    return MODULES[family](f"{family}-tiny", lr=1e-3, **sizes | options)


def rows() -> Any:
    """``STEPS`` global batches of 8 samples of 16 tokens."""
    tokens = torch.randint(61, (STEPS * 8, 17), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def batches(replicas: int) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=8 // replicas, shuffle=True)


class Resumable(LightningDataModule):
    """The same samples by a loader that goes on in mid-epoch, which torch's own does not."""

    def train_dataloader(self) -> ResumableDataLoader:
        dp = self.trainer.strategy.mesh.dp  # type: ignore[union-attr]
        sampler = MegatronSampler(STEPS * 8, batch_size=8 // dp.size, dp_rank=dp.rank, dp_size=dp.size)
        return ResumableDataLoader(rows(), batch_sampler=sampler)


def replicas_of(world_size: int, layout: dict[str, Any]) -> int:
    """Data-parallel ranks."""
    return int(world_size // (layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)))


def losses(
    family: str,
    accelerator: str,
    world_size: int,
    layout: dict[str, Any],
    precision: str = "32-true",
    trainer_options: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> list[float]:
    """Loss and gradient norm of each step."""
    recorder = Recorder()
    scaled: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # the usual scale of 2^32 would skip the few steps that there are
        scaled = {"plugins": [MegatronPrecision(precision, DynamicLossScale(scale=2.0**10))]}
    strategy = MegatronStrategy(micro_batch_size=2, **layout, **options)
    trainer = quiet_trainer(
        strategy,
        accelerator=accelerator,
        devices=world_size,
        max_epochs=1,
        logger=recorder,
        gradient_clip_val=1.0,
        **scaled,
        **trainer_options,
    )
    trainer.fit(module_of(family), batches(replicas_of(world_size, layout)))
    assert trainer.strategy.root_device.type == accelerator
    return recorder.series("train_loss") + recorder.series("grad_norm")


def both(family: str, world_size: int, layout: dict[str, Any], precision: str) -> tuple[list[float], list[float]]:
    return (
        losses(family, "cuda", world_size, layout, precision),
        losses(family, "cpu", world_size, layout, precision),
    )


@pytest.mark.parametrize("precision", list(CLOSE))
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_losses_and_norms_are_those_on_cpus(ranks: Ranks, name: str, precision: str) -> None:
    family, world_size, layout = LAYOUTS[name]
    for found, right in ranks(world_size, both, family, world_size, layout, precision):
        assert len(right) >= STEPS
        assert found == pytest.approx(right, rel=CLOSE[precision])
        assert right[STEPS - 1] < right[0]


def repeated(family: str, world_size: int, layout: dict[str, Any], precision: str) -> list[list[float]]:
    options = {"precision": precision, "trainer_options": {"deterministic": True}}
    try:
        return [losses(family, "cuda", world_size, layout, **options) for _ in range(3)]  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["llama", "llama-dp2", "llama-tp2-sp", "llama-pp2", "llama-cp2", "mixtral-ep2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_run_repeats_bit_for_bit(ranks: Ranks, name: str, precision: str) -> None:
    family, world_size, layout = LAYOUTS[name]
    for first, second, third in ranks(world_size, repeated, family, world_size, layout, precision):
        assert first == second == third
        assert first[STEPS - 1] < first[0]


def with_recompute(world_size: int, layout: dict[str, Any]) -> list[list[float]]:
    return [
        losses("llama", "cuda", world_size, layout, "bf16-mixed", recompute=how) for how in (None, "selective", "full")
    ]


@pytest.mark.parametrize("name", ["llama", "llama-tp2-sp", "llama-pp2"])
def test_recomputed_activations_change_nothing(ranks: Ranks, name: str) -> None:
    _, world_size, layout = LAYOUTS[name]
    for kept, selective, full in ranks(world_size, with_recompute, world_size, layout):
        assert kept == selective == full


def killed_and_resumed(folder: Path, world_size: int, layout: dict[str, Any], in_background: bool) -> Any:
    """Loss of steps 4 to 6: of a run without a break, and of one resumed after three steps."""

    def run(**options: Any) -> list[float]:
        recorder = Recorder()
        trainer = quiet_trainer(
            MegatronStrategy(micro_batch_size=2, async_save=in_background, **layout),
            devices=world_size,
            logger=recorder,
            precision="bf16-mixed",
            enable_checkpointing=True,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)],
            max_epochs=1,
        )
        trainer.fit(
            module_of("llama", hidden_dropout=0.1, attention_dropout=0.1),
            datamodule=Resumable(),
            **options,
        )
        return recorder.series("train_loss")

    whole = run()
    return whole, run(ckpt_path=folder / "step=3.ckpt"), verify(folder / "step=6.ckpt")


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["llama", "llama-dp2", "llama-tp2-pp2-dp2"])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, name: str, in_background: bool) -> None:
    _, world_size, layout = LAYOUTS[name]
    for whole, resumed, found in ranks(world_size, killed_and_resumed, tmp_path, world_size, layout, in_background):
        assert not found
        assert resumed == whole[3:]
        assert len(resumed) == 3


def test_the_cards_own_kernels_are_called() -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        losses("llama", "cuda", 1, {}, "bf16-mixed")
    kernels = " ".join(event.key.lower() for event in seen.key_averages())
    assert "flash" in kernels or "cudnn" in kernels, kernels
    assert "fused_adam" in kernels or "multi_tensor" in kernels or "fusedadam" in kernels, kernels


def test_steps_do_not_wait_for_the_card() -> None:
    """No copy from the card that the host waits for, from one batch's start to the next, in steps that log nothing."""
    seed_everything(5, verbose=False)
    seen: list[int] = []

    class Watch(LlamaModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.cuda.set_sync_debug_mode("error" if batch_idx == 2 else "default")
            seen.append(batch_idx)

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 61}
    module = Watch("llama-tiny", lr=1e-3, **sizes, ffn_hidden_size=128)
    trainer = quiet_trainer(
        MegatronStrategy(micro_batch_size=2), devices=1, max_epochs=1, precision="bf16-mixed", log_every_n_steps=50
    )
    try:
        trainer.fit(module, batches(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == list(range(STEPS))

"""Mixtral over ranks that share its experts: losses and logits of ranks that hold all of them, and the work divided.

Every rank is a replica of the data; what differs is the number of ranks over which experts lie. The kernels of the
simulated operator (``simulated_hpu/ops/experts.py``) keep one weight where ids repeat, and raise on ids and rows that
the real ones cannot take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from simulated_hpu import calls
from simulated_hpu.settings import settings
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronHPUStrategy, MixtralModule
from lightning_megatron.models.generate import generate
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

BATCH, LENGTH, WORDS, LAYERS, K, EXPERTS = 2, 16, 61, 2, 2, 8
SIZES: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
SIZES |= {"vocab_size": WORDS, "ffn_hidden_size": 48, "init_std": 0.1, "vocab_multiple": 4, "num_experts": EXPERTS}
WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"moe_token_dispatcher": "allgather"},
    "dynamic": {"moe_dynamic": True},
    "alltoall": {},
    "bins": {"moe_capacity_bins": 2, "moe_capacity_bins_alignment": 2},
    "drops": {"moe_token_dispatcher": "allgather", "moe_capacity_factor": 0.75},
    "drops, padded": {"moe_capacity_factor": 0.75, "moe_pad_to_capacity": True},
}
FUSED = ("allgather", "dynamic", "drops")
NUMBERS = ("train_loss", "grad_norm", "val_loss", "test_loss")
HAS_KERNEL = not settings().is_old
EMPTY = torch.empty(0)
not_lazy = pytest.mark.skipif(settings().is_lazy, reason="lazy mode compiles by itself, and refuses")


class RowsOfExperts(Callback):
    """Rows that this rank's experts multiply in one batch of training and one of validation, by kernel.

    The last batch counts: in the first one, the operator is asked which kernel it is.
    """

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()
        self.training: Counter[str] = Counter()
        self.validation: Counter[str] = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self._before = calls.expert_rows()

    def on_train_batch_end(self, *_: Any) -> None:
        self.training = calls.expert_rows() - self._before

    def on_validation_batch_start(self, *_: Any) -> None:
        self._before = calls.expert_rows()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.validation = calls.expert_rows() - self._before


def samples(first: int, number: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(WORDS, (number, LENGTH + 1), generator=torch.Generator().manual_seed(first))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def evaluation(inference: bool) -> Any:
    return torch.inference_mode() if inference else torch.no_grad()


class Evaluated(MixtralModule):
    """Evaluation in inference mode, or without: where the default group is of gloo, Lightning never chooses it."""

    inference = True

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with evaluation(self.inference):
            super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with evaluation(self.inference):
            super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        with evaluation(self.inference):
            return super().predict_step(batch, batch_idx)


def job(way: str, ep: int, inference: bool = True, **options: Any) -> dict[str, Any]:
    """Numbers of training with validation, of a test, a prediction and a continued prompt, and rows of experts."""
    seed_everything(5, verbose=False)
    module = Evaluated("mixtral-tiny", lr=1e-3, **SIZES, **WAYS[way])
    module.inference = inference
    recorder = Recorder()
    strategy = MegatronHPUStrategy(micro_batch_size=2, ep=ep, **options)
    trainer = quiet_trainer(
        strategy,
        max_epochs=1,
        logger=recorder,
        gradient_clip_val=1.0,
        inference_mode=inference,
        callbacks=[counted := RowsOfExperts()],
    )
    loaders = [DataLoader(samples(seed, size), batch_size=BATCH) for seed, size in ((1, 24), (2, 16))]  # type: ignore[arg-type]
    trainer.fit(module, *loaders)
    trainer.test(module, loaders[1], verbose=False)
    logits = trainer.predict(module, loaders[1])
    found: dict[str, Any] = {name: recorder.series(name) for name in NUMBERS}
    found |= {"logits": torch.stack([part.cpu() for part in logits or []])}
    if "compile" not in options:
        prompt = torch.arange(5, device=module.device).unsqueeze(0)
        assert module.model is not None
        with evaluation(inference):
            found["continued"] = generate(module.model, prompt, 3, temperature=0.0).cpu()
    return found | {"rows": (counted.training, counted.validation)}


def jobs(way: str, eps: list[int], **options: Any) -> list[dict[str, Any]]:
    return [job(way, ep, **options) for ep in eps]


def compare(answers: list[list[dict[str, Any]]]) -> None:
    for whole, *shared in answers:
        assert len(whole["val_loss"]) == len(whole["test_loss"]) == 1
        assert whole["train_loss"][0] != whole["train_loss"][-1]
        for other in shared:
            for name in NUMBERS:
                assert other[name] == pytest.approx(whole[name], rel=2e-5), name
            torch.testing.assert_close(other["logits"], whole["logits"], rtol=1e-4, atol=1e-4)
            assert torch.equal(other.get("continued", EMPTY), whole.get("continued", EMPTY))


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_numbers_do_not_depend_on_the_ranks_that_share_experts(ranks: Callable[..., list[Any]], way: str) -> None:
    compare(ranks(2, jobs, way, [1, 2]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", list(WAYS))
def test_nor_on_four_of_them(ranks: Callable[..., list[Any]], way: str) -> None:
    compare(ranks(4, jobs, way, [1, 2, 4]))


@pytest.mark.slow
def test_without_inference_mode_too(ranks: Callable[..., list[Any]]) -> None:
    """The bridge then calls another kernel of the operator."""
    compare(ranks(2, jobs, "dynamic", [1, 2], inference=False))


@not_lazy
@pytest.mark.slow
@pytest.mark.parametrize("way", ["dynamic", "bins"])
def test_compiled_blocks_too(ranks: Callable[..., list[Any]], way: str) -> None:
    compare(ranks(2, jobs, way, [1, 2], compile="aot_eager"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_KERNEL, reason="1.19 trains without the operator")
def test_ranks_that_share_experts_share_their_work(ranks: Callable[..., list[Any]]) -> None:
    """A rank sees ``ep`` times the tokens of its replica, and computes what is for its ``1/ep`` of the experts."""
    tokens, world = BATCH * LENGTH * LAYERS, 4
    answers = ranks(world, jobs, "dynamic", [1, 2, 4])
    compare(answers)
    lazy = settings().is_lazy
    for number, ep in enumerate((1, 2, 4)):
        seen = tokens * ep * world
        ranged, dense = {"ranged": seen * K // ep}, {"dense": seen * EXPERTS // ep}
        training, validation = zip(*(answer[number]["rows"] for answer in answers), strict=True)
        assert sum(training, Counter()) == (dense if settings().profile == "1.22" and not lazy else ranged)
        assert sum(validation, Counter()) == (ranged if lazy else dense)

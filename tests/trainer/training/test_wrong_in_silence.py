"""Faults with which training would continue silently: unknown ids, copies that drift apart, values not there yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, LlamaModule, MegatronStrategy
from lightning_megatron.errors import DataError
from lightning_megatron.optim.replicas import ReplicaError
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from tests.late import late_gathers

Ranks = Callable[..., list[Any]]
VOCABULARY, LENGTH, WIDTH = 61, 12, 32
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SIZES |= {"vocab_multiple": 4, "max_position_embeddings": 16, "init_std": 0.1, "lr": 1e-2}
LLAMA = SIZES | {"num_query_groups": 2, "ffn_hidden_size": 48}


def samples(n: int = 24) -> list[dict[str, Tensor]]:
    tokens = torch.randint(VOCABULARY, (n, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1].clone(), "labels": row[1:].clone()} for row in tokens]


def fit(module: LightningModule, data: Any, batch_size: int = 4, **layout: Any) -> Recorder:
    recorder = Recorder()
    strategy = MegatronStrategy(bucket_size=2000, **layout)
    trainer = quiet_trainer(strategy, max_epochs=1, logger=recorder, use_distributed_sampler="dp" not in layout)
    trainer.fit(module, data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size))
    return recorder


# Ids


LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"micro_batch_size": 2}]


def texts_of_bad_ids(key: str, value: int) -> list[str]:
    """Result of training on every layout with one bad id, in the second batch of one replica."""
    texts = []
    for layout in LAYOUTS:
        seed_everything(1, verbose=False)
        data = samples()
        data[9][key][5] = value  # of two replicas the second reads it, in its fifth batch of one sample
        texts.append(text_of(lambda data=data, layout=layout: fit(GPTModule("gpt-tiny", **SIZES), data, **layout)))
    # Evaluation, in which replicas need not have equally many batches: the last data are those of the last layout.
    trainer = quiet_trainer(MegatronStrategy(), logger=False)
    texts.append(text_of(lambda: trainer.validate(GPTModule("gpt-tiny", **SIZES), DataLoader(data), verbose=False)))  # type: ignore[arg-type]
    return texts


def text_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except DataError as error:
        return str(error)
    return "ran on"


@pytest.mark.parametrize(("key", "value"), [("labels", 10**9), ("tokens", -7)])
def test_a_bad_id_ends_training_on_all_ranks_with_one_text(ranks: Ranks, key: str, value: int) -> None:
    first, second = ranks(2, texts_of_bad_ids, key, value)
    assert first == second
    for text, layout in zip(first, [*LAYOUTS, "validate"], strict=True):
        assert f"is {value}: vocab_size={VOCABULARY}, so ids are 0 to 60" in text, (layout, text)
        assert f"batch['{key}']" in text
    assert "data-parallel rank" in first[-1]
    assert first[-1].count("is ") == 2, "the replica with a sound batch has nothing to say"


# Copies


class Hooked(LlamaModule):
    """A head on an activation inside the model: on each tp rank a shard of the sequence."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "value"):
            torch.manual_seed(1)
            self.value = nn.Linear(WIDTH, 1)
            assert self.model is not None
            self.model.head.norm.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.inside = out

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + self.value(self.inside).square().mean()


def outcome_of_hooked(**layout: Any) -> str:
    seed_everything(1, verbose=False)
    module = Hooked("llama-tiny", **LLAMA)
    try:
        fit(module, samples(), **layout)
    except ReplicaError as error:
        return f"step {module.global_step}: {error}"
    return "trained"


def outcomes_of_hooked() -> list[str]:
    return [outcome_of_hooked(tp=2), outcome_of_hooked(tp=2, sequence_parallel=False)]


def test_copies_that_would_drift_apart_are_named_in_the_first_step(ranks: Ranks) -> None:
    for sharded, whole in ranks(2, outcomes_of_hooked):
        assert "step 0: gradients of value.bias, value.weight differ" in sharded or "of value.weight differ" in sharded
        assert "module.hidden(batch)" in sharded
        assert whole == "trained", "without sequence parallelism every rank sees the whole"


# Values


class Direct(LlamaModule):
    """An untied output layer, a parameter of the module's own, and attention of torch's."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "slope"):
            torch.manual_seed(1)
            self.slope = nn.Parameter(torch.tensor([1.5]))
            self.mixing = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        slope = self.slope * 1.0
        hidden = self.hidden(batch)
        mixed, _ = self.mixing(hidden, hidden, hidden)
        loss: Tensor = slope * self.loss(batch, hidden) + F.mse_loss(mixed, hidden.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.slope * self.loss(batch), sync_dist=True)


def losses_with_late_gathers() -> tuple[list[float], list[float]]:
    found = []
    for overlap in (False, True):
        seed_everything(1, verbose=False)
        with late_gathers():
            module = Direct("llama-tiny", tie_embeddings=False, **LLAMA)
            recorder = fit(module, samples(), 2, overlap_param_gather=overlap)
        found.append(recorder.series("loss"))
    assert dist.get_world_size() == 2
    return found[0], found[1]


def test_a_step_waits_for_every_parameter_that_it_reads(ranks: Ranks) -> None:
    for waited, overlapped in ranks(2, losses_with_late_gathers):
        assert len(waited) == 6
        assert overlapped == waited

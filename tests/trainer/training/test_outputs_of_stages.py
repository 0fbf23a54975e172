"""What users write around a pipeline: batches of any form, and what a step returned, in hooks of every stage."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.data import DataError
from lightning_megatron.lightning.modules.text_batch import tokens_of
from lightning_megatron.testing.trainer import quiet_trainer

Ranks = Callable[..., list[Any]]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 8}
TOKENS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(2))
Seen = list[tuple[float, float, list[int]]]


class Pairs(GPTModule):
    """Takes a tuple for a batch, and returns more than a loss."""

    def __init__(self) -> None:
        super().__init__(lr=1e-2, hidden_dropout=0.0, attention_dropout=0.0, **SIZES)
        self.seen: Seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        loss = super().training_step({"tokens": tokens, "labels": labels}, batch_idx)
        return {"loss": loss, "half": loss / 2, "firsts": tokens[:, 0]}


class InModule(Pairs):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), float(outputs["half"]), outputs["firsts"].tolist()))


class Reads(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen.append((float(outputs["loss"]), float(outputs["half"]), outputs["firsts"].tolist()))


def train(kind: type[Pairs], strategy: dict[str, Any], callbacks: list[Callback]) -> Seen:
    torch.manual_seed(5)
    pairs = [(row[:-1], row[1:]) for row in TOKENS]
    module = kind()
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_epochs=1, callbacks=callbacks)
    trainer.fit(module, DataLoader(pairs, batch_size=4))  # type: ignore[arg-type]
    return module.seen


@pytest.mark.parametrize("more", [{}, {"micro_batch_size": 2}], ids=["whole", "micro-batches"])
@pytest.mark.parametrize(("kind", "callbacks"), [(InModule, []), (Pairs, [Reads()])], ids=["module", "callback"])
def test_every_stage_has_what_the_last_one_returned(
    ranks: Ranks, kind: type[Pairs], callbacks: list[Callback], more: dict[str, Any]
) -> None:
    alone = train(kind, more, callbacks)
    assert len(alone) == 2
    for seen in ranks(2, train, kind, {"pp": 2, **more}, callbacks):
        for (loss, half, firsts), (its_loss, its_half, its_firsts) in zip(seen, alone, strict=True):
            assert (loss, half) == pytest.approx((its_loss, its_half), rel=1e-5)
            assert firsts == its_firsts


GRID = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "batch",
    [GRID, {"tokens": GRID, "other": GRID[:, :1]}, (GRID, GRID), [torch.zeros(2), GRID], UserDict(input_ids=GRID)],
    ids=["tensor", "tokens", "pair", "list", "other names"],
)
def test_tokens_are_found_where_their_shape_is_clear(batch: Any) -> None:
    assert tokens_of(batch).shape == GRID.shape


@pytest.mark.parametrize("batch", [(GRID, GRID[:, :2]), {"x": torch.zeros(2, 4)}, "text", (GRID[0], None)])
def test_a_batch_that_does_not_say_it_is_refused_by_name(batch: tuple[Any, ...] | Mapping[str, Tensor] | str) -> None:
    with pytest.raises(
        DataError, match=rf"a {type(batch).__name__} with .*'tokens' \[B, S\], or override hidden_shape"
    ):
        tokens_of(batch)


class LogsMore(Pairs):
    """Logs other names in some steps, once more than fit into a message."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        for number in range((1, 70, 0, 1)[batch_idx]):
            self.log(f"x{number}", output["loss"].detach() + number)
        return output


def logged(strategy: dict[str, Any]) -> list[dict[str, float]]:
    torch.manual_seed(5)
    found: list[dict[str, float]] = []

    class Keeps(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    pairs = [(row[:-1], row[1:]) for row in TOKENS]
    trainer = quiet_trainer(MegatronStrategy(**strategy), max_epochs=1, callbacks=[Keeps()])
    trainer.fit(LogsMore(), DataLoader(pairs, batch_size=2))  # type: ignore[arg-type]
    return found


def test_every_stage_logs_what_the_last_one_does_where_names_change_from_step_to_step(ranks: Ranks) -> None:
    alone = logged({})
    assert [len(metrics) for metrics in alone] == sorted(len(metrics) for metrics in alone)
    for found in ranks(2, logged, {"pp": 2}):
        assert [list(metrics) for metrics in found] == [list(metrics) for metrics in alone]
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)

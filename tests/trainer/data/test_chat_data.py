"""Chats under a Trainer: rows of an epoch in any layout, resumed at the exact row, validated without repetition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chats import chat, make_tokenizer, write_lines
from lightning.pytorch import Callback, seed_everything

from lightning_megatron import ChatDataModule, LlamaModule, MegatronStrategy
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

pytestmark = pytest.mark.skipif(
    kind_in_tests() is not CPU, reason="chats are packed, and documents in a batch are refused on a Gaudi"
)

TINY: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2}
TINY |= {"num_query_groups": 2, "vocab_size": 400, "max_position_embeddings": 144}
GLOBAL_BATCH, LENGTH = 8, 144
Layout = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("chats")
    draw = np.random.default_rng(1).integers(1, 12, (102, 2)).tolist()
    file = write_lines(folder / "chats.jsonl", [chat(f"{i}" + " b" * q, "c " * a) for i, (q, a) in enumerate(draw)])
    return str(file), str(make_tokenizer(folder / "tokenizer"))


class Seen(Callback):
    """Rows that this rank was given, by their content, and how many validation rows have documents."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, list[bytes]]] = []
        self.validated = self.padding = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        found = [row.numpy().tobytes() for row in batch["tokens"]]
        self.rows.append((trainer.current_epoch, trainer.global_step, found))

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        filled = int((batch["loss_mask"].sum(1) > 0).sum())
        self.validated += filled
        self.padding += len(batch["tokens"]) - filled


class Apart(LlamaModule):
    """Reads rows as one document each: here it is the rows that matter."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {key: value for key, value in batch.items() if key != "segment_ids"}


def data_module(corpus: tuple[str, str], dp: int) -> ChatDataModule:
    files, tokenizer = corpus
    size = GLOBAL_BATCH // dp
    return ChatDataModule(files, tokenizer, LENGTH, batch_size=size, chat_template="chatml", val_share=0.2)


def leg(corpus: tuple[str, str], folder: str, number: int, layout: Layout, last: int) -> tuple[int, Seen]:
    """Train up to a step, from where the leg before has stopped."""
    seed_everything(7, verbose=False)
    options = dict(layout)
    data = data_module(corpus, options.pop("dp", 1))
    seen = Seen()
    trainer = quiet_trainer(MegatronStrategy(**options), max_steps=last, callbacks=[seen], val_check_interval=1.0)
    before = None if number == 0 else f"{folder}/{number - 1}.ckpt"
    trainer.fit(Apart("llama-tiny", **TINY), data, ckpt_path=before)
    trainer.save_checkpoint(f"{folder}/{number}.ckpt")
    return trainer.strategy.data_parallel_rank, seen


CHAINS: dict[str, list[tuple[int, Layout, int]]] = {
    "dp 1, 2, 4": [(1, {}, 2), (2, {"dp": 2}, 5), (4, {"dp": 4}, 9)],
    "dp 2 with tp 2, 1": [(4, {"dp": 2, "tp": 2}, 3), (1, {"micro_batch_size": 4}, 9)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_rows_go_on_at_the_exact_row_with_another_number_of_replicas(ranks, corpus, tmp_path, chain):
    _, plain = leg(corpus, str(tmp_path), 0, {}, 9)
    expected = [(step, b"".join(rows)) for _, step, rows in plain.rows]
    assert {epoch for epoch, _, _ in plain.rows} == {0, 1, 2}, "three epochs are read"
    assert len({rows for _, rows in expected}) == len(expected), "each in an order of its own"
    found = []
    for number, (size, layout, last) in enumerate(CHAINS[chain]):
        by_replica = dict(ranks(size, leg, corpus, str(tmp_path / "legs"), number, layout, last))
        for parts in zip(*(by_replica[replica].rows for replica in sorted(by_replica)), strict=True):
            found.append((parts[0][1], b"".join(row for part in parts for row in part[2])))
    assert found == expected


@pytest.mark.parametrize(("size", "layout"), [(1, {}), (1, {"micro_batch_size": 2}), (2, {"dp": 2})], ids=str)
def test_an_epoch_reads_all_rows_where_they_do_not_fill_the_last_batch(ranks, corpus, tmp_path, size, layout):
    rows = data_module(corpus, 1).rows()
    assert rows is not None
    assert len(rows) % GLOBAL_BATCH, "the last batch is smaller"
    there = sorted(rows[number]["tokens"].numpy().tobytes() for number in range(len(rows)))
    one = (corpus, str(tmp_path), 0, layout, 4)
    found = [leg(*one)] if size == 1 else ranks(size, leg, *one)
    first = [row for _, seen in found for epoch, _, part in seen.rows if epoch == 0 for row in part]
    assert sorted(set(first)) == sorted(set(there))
    assert len(first) == -(-len(there) // size) * size


def test_validation_reads_each_row_once_and_no_padding(ranks, corpus, tmp_path):
    rows = data_module(corpus, 1).rows("val")
    assert rows is not None
    seen = dict(ranks(2, leg, corpus, str(tmp_path), 0, {"dp": 2}, 5))
    validations = sum(one.validated for one in seen.values()) // len(rows)
    assert validations >= 1
    assert sum(one.validated for one in seen.values()) == validations * len(rows)
    assert sum(one.padding for one in seen.values()) == 0


def losses_of(corpus: tuple[str, str], **options: Any) -> list[float]:
    seed_everything(7, verbose=False)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(micro_batch_size=2), max_steps=4, logger=recorder)
    trainer.fit(LlamaModule("llama-tiny", **TINY, **options), data_module(corpus, 1))
    return recorder.series("train_loss")


def test_the_mean_over_tokens_is_the_default_with_chats(corpus):
    asked: list[dict[str, Any]] = [{}, {"loss_reduction": "token"}, {"loss_reduction": "sample"}]
    by_default, token, sample = (losses_of(corpus, **options) for options in asked)
    assert by_default == token
    assert by_default != sample


@pytest.mark.parametrize("validation", [{}, {"val_share": 0.1}, {"val_files": True}], ids=str)
def test_nothing_is_said_about_a_split_which_chats_do_not_have(corpus, recwarn, validation):
    files, tokenizer = corpus
    given = {name: files if value is True else value for name, value in validation.items()}
    data = ChatDataModule(files, tokenizer, LENGTH, chat_template="chatml", **given)
    for stage in ("fit", "validate", "test"):
        data.setup(stage)
    assert not [text for each in recwarn if "split" in (text := str(each.message)) or "_samples" in text]

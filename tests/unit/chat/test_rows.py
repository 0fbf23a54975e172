"""Rows as batches: labels, masks and segments; what is cut, dropped, repeated, held out; cache and fingerprint."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import chat, make_tokenizer, write_lines

from lightning_megatron import ChatDataModule, ConfigError
from lightning_megatron.data import PackedChats, fingerprint_problems
from lightning_megatron.data.chat import encoded


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rows_of(tokenizer: Path, files: Any, stage: Any = "train", **options: Any) -> PackedChats:
    data = ChatDataModule(files, tokenizer, **{"seq_length": 96, "chat_template": "chatml", **options})
    rows = data.rows(stage)
    assert rows is not None
    return rows


def corpus(folder: Path, count: int = 40, name: str = "chats", letter: str = "a") -> Path:
    draw = np.random.default_rng(len(name)).integers(1, 12, (count, 2))
    return write_lines(
        folder / f"{name}.jsonl", [chat(f"{letter} " * q, f"{i} " + "b " * a) for i, (q, a) in enumerate(draw.tolist())]
    )


def test_a_row_repeats_its_documents_with_labels_masks_and_segments(tmp_path: Path, tokenizer: Path):
    rows = rows_of(tokenizer, corpus(tmp_path))
    for number in range(len(rows)):
        row, start = rows[number], 0
        assert {name: (tuple(v.shape), v.dtype) for name, v in row.items()} == {
            "tokens": ((96,), torch.int64),
            "labels": ((96,), torch.int64),
            "loss_mask": ((96,), torch.float32),
            "segment_ids": ((96,), torch.int64),
        }
        documents = rows.documents(number)
        for segment, (ids, is_answer) in enumerate(documents, 1):
            here = slice(start, start + len(ids))
            assert row["tokens"][here].tolist() == ids.tolist()
            assert row["labels"][here].tolist() == [*ids[1:].tolist(), -100]
            assert row["loss_mask"][here].tolist() == [*is_answer[1:].astype(float).tolist(), 0.0]
            assert (row["segment_ids"][here] == segment).all()
            start += len(ids)
        rest = {name: set(values[start:].tolist()) for name, values in row.items() if start < 96}
        assert rest in ({}, {"tokens": {0}, "labels": {-100}, "loss_mask": {0.0}, "segment_ids": {0}})
    lines = sorted(line for number in range(len(rows)) for _, line in rows.place(number))
    assert lines == list(range(1, 41))
    tokens = sum(int((rows[number]["segment_ids"] > 0).sum()) for number in range(len(rows)))
    learnt = sum(int(rows[number]["loss_mask"].sum()) for number in range(len(rows)))
    assert (rows.report.tokens, rows.report.answer_tokens) == (tokens, learnt)
    empty = rows[None]
    assert not empty["loss_mask"].any()
    assert not empty["segment_ids"].any()
    with pytest.raises(IndexError, match=rf"there are {len(rows)} rows, and none has the number {len(rows)}"):
        rows[len(rows)]


def test_what_is_too_long_is_cut_or_dropped_and_counted(tmp_path: Path, tokenizer: Path):
    records = [chat("a", "b"), chat("a", "b " * 90), chat("a " * 90, "b")]
    file = write_lines(tmp_path / "chats.jsonl", records)
    cut = rows_of(tokenizer, file, too_long="cut")
    assert (cut.report.conversations, cut.report.cut, cut.report.dropped, cut.report.unanswered) == (2, 1, 0, 1)
    whole = rows_of(tokenizer, file, seq_length=512)
    by_line = {
        line: document
        for n in range(len(whole))
        for (_, line), document in zip(whole.place(n), whole.documents(n), strict=True)
    }
    (number,) = [n for n in range(len(cut)) if cut.place(n) == [(file, 2)]]
    ((ids, mask),) = cut.documents(number)
    assert ids.tolist() == by_line[2][0][:96].tolist()
    assert mask.tolist() == by_line[2][1][:96].tolist()
    assert int(cut[number]["loss_mask"].sum()) == int(mask[1:].sum())
    assert "1 too long and cut; 1 dropped, since the cut took every answer" in str(cut.report)
    dropped = rows_of(tokenizer, file, too_long="drop")
    assert (dropped.report.conversations, dropped.report.dropped) == (1, 2)
    assert str(dropped.report).endswith("; 2 too long and dropped")


def test_weights_repeat_conversations_of_the_files_with_a_large_share(tmp_path: Path, tokenizer: Path):
    a, b = corpus(tmp_path, 30, "first"), corpus(tmp_path, 10, "second", "c")
    rows = rows_of(tokenizer, [(1, str(a)), [1.0, str(b)]])
    read = [place for number in range(len(rows)) for place in rows.place(number)]
    assert sorted(line for file, line in read if file == a) == list(range(1, 31))
    assert sorted(line for file, line in read if file == b) == sorted(list(range(1, 11)) * 3)
    assert rows.report.conversations == 60
    plain = rows_of(tokenizer, [str(a), b])
    assert plain.report.conversations == 40


def test_a_share_or_files_for_validation(tmp_path: Path, tokenizer: Path):
    file, other = corpus(tmp_path, 40), corpus(tmp_path, 5, "other")
    data = {"files": file, "val_share": 0.25, "test_files": other}
    lines = {
        stage: [line for n in range(len(rows)) for _, line in rows.place(n)]
        for stage in ("train", "val", "test")
        if (rows := rows_of(tokenizer, data["files"], stage, val_share=0.25, test_files=other))
    }
    assert sorted([*lines["train"], *lines["val"]]) == list(range(1, 41))
    assert (len(lines["val"]), sorted(lines["test"])) == (10, [1, 2, 3, 4, 5])
    assert ChatDataModule(file, tokenizer, 96, chat_template="chatml").rows("val") is None


def test_tokens_and_rows_are_made_once_and_again_only_where_something_changed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    file, read = corpus(tmp_path), []
    real = encoded.read_conversations
    monkeypatch.setattr(encoded, "read_conversations", lambda path: (read.append(path), real(path))[1])
    first = rows_of(tokenizer, file)
    again = rows_of(tokenizer, file)
    longer = rows_of(tokenizer, file, seq_length=128)
    assert len(read) == 1
    assert [first.place(n) for n in range(len(first))] == [again.place(n) for n in range(len(again))]
    assert len(longer) < len(first)
    copy = pickle.loads(pickle.dumps(first))
    assert all(torch.equal(copy[1][name], first[1][name]) for name in first[1])
    rows_of(tokenizer, file, chat_template="zephyr")
    file.write_text(file.read_text() + json.dumps(chat("a", "b")) + "\n")
    assert rows_of(tokenizer, file).report.conversations == 41
    assert len(read) == 3
    moved = tmp_path / "elsewhere"
    rows_of(tokenizer, file, cache_dir=moved)
    assert len(list(moved.glob("*chats-tokens.npy"))) == 1


def rewrite(file: Path, **entries: Any) -> None:
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**held, **entries}))


def flagged(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}
    return {"content": content, **usual, **flags}


CHANGES: dict[str, Callable[[Path], object]] = {
    "a flag": lambda folder: rewrite(
        folder / "tokenizer_config.json", added_tokens_decoder={"900": flagged("dog", lstrip=True)}
    ),
    "a name of the template": lambda folder: rewrite(folder / "tokenizer_config.json", bos_token="<|im_start|>"),
    "the older file": lambda folder: rewrite(
        folder / "special_tokens_map.json", additional_special_tokens=[flagged("fox", rstrip=True)]
    ),
    "the vocabulary": lambda folder: rewrite(folder / "tokenizer.json", normalizer={"type": "Lowercase"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_in_a_cache_are_those_of_a_fresh_one_when_the_tokenizer_has_changed(tmp_path: Path, change: str):
    """The tokenizer before the change has a word of its own, and every change shows in the tokens of a row."""
    folder = make_tokenizer(tmp_path / "tokenizer")
    settings, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    content = json.loads(settings.read_text())
    content.pop("added_tokens_decoder", None)
    settings.write_text(json.dumps(content))
    rewrite(older, additional_special_tokens=[flagged("fox")])
    if change != "the older file":
        rewrite(settings, added_tokens_decoder={"900": flagged("dog")})
    template = (
        "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ bos_token + m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    file = write_lines(tmp_path / "chats.jsonl", [chat("The dog  and the fox  run", "a dog , a fox too")])
    options: dict[str, Any] = {"chat_template": template, "cache_dir": tmp_path / "cache"}
    before, saved = rows_of(folder, file, **options), ChatDataModule(file, folder, 96, **options).fingerprint
    CHANGES[change](folder)
    now = rows_of(folder, file, **options)
    fresh = rows_of(folder, file, **{**options, "cache_dir": tmp_path / "fresh"})
    assert not torch.equal(fresh[0]["tokens"], before[0]["tokens"])
    assert torch.equal(now[0]["tokens"], fresh[0]["tokens"])
    assert fingerprint_problems(saved, ChatDataModule(file, folder, 96, **options).fingerprint)


def test_a_compressed_file_gives_the_same_rows(tmp_path: Path, tokenizer: Path):
    import gzip

    file = corpus(tmp_path)
    packed = tmp_path / "chats.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, zipped = rows_of(tokenizer, file), rows_of(tokenizer, packed)
    assert all(torch.equal(plain[n]["tokens"], zipped[n]["tokens"]) for n in range(len(plain)))


def test_a_checkpoint_of_other_chats_is_not_resumed(tmp_path: Path, tokenizer: Path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import TrainerFn

    file = corpus(tmp_path)
    saved = ChatDataModule(file, tokenizer, 96, chat_template="chatml").fingerprint
    data = ChatDataModule(corpus(tmp_path, 41), tokenizer, 128, chat_template="zephyr", too_long="cut")
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    data.trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigError) as raised:
        data.load_state_dict({"fingerprint": saved})
    assert [problem.argument for problem in raised.value.problems] == [
        "files[0]",
        "seq_length",
        "too_long",
        "chat_template",
        "allow_other_data",
    ]

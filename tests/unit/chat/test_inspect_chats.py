"""``lightning-megatron inspect`` of chats: documents of a row, and what of them is learnt, in colour or in brackets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import chat, make_tokenizer, write_lines

from lightning_megatron.tools.cli.main import main


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("chats")
    file = write_lines(folder / "chats.jsonl", [chat("Hi [you]", "Ho"), chat("Why?", "So."), chat("a " * 99, "b")])
    tokenizer = make_tokenizer(folder / "tokenizer")
    return [
        "inspect",
        str(file),
        "--seq-length",
        "96",
        "--tokenizer-model",
        str(tokenizer),
        "--chat-template",
        "chatml",
    ]


def test_a_row_is_shown_with_its_documents_and_what_is_learnt_in_brackets(words: list[str], capsys: Any):
    assert main([*words, "--sample", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 conversations in 1 rows of 96 tokens: ")
    assert lines[0].endswith("; 1 too long and dropped")
    assert lines[2].startswith("row 0: 2 documents, ")
    text = "\n".join(lines)
    for line, user, answer in ((1, "Hi [you]", "Ho"), (2, "Why?", "So.")):
        assert f"learnt ({words[1]}, line {line})" in text
        asked = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        assert f"{asked}\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}{answer}<|im_end|>" in text
    assert not list(Path(words[1]).parent.glob("cache")), "nothing is written beside the data"


def test_on_a_terminal_what_is_learnt_is_green(words: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([*words, "--sample", "0"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[32mHo<|im_end|>\x1b[0m" in out
    assert "\x1b[2mHi [you]<|im_end|>" in out
    assert "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}" not in out


def test_counts_are_json_and_faults_name_their_options(words: list[str], capsys: Any):
    assert main([*words, "--json", "--too-long", "cut"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["conversations"], counts["unanswered"], counts["rows"]) == (2, 1, 1)
    for more, text in (
        (["--sample", "1"], "--sample=1: there are 1 rows, from 0"),
        (["--document", "1"], "--document=1: files of chats have --sample K, a row with its documents"),
        (["--too-long", "error"], "line 3: a conversation of"),
        (["--chat-template", "chatmml"], "chat_template='chatmml': is neither a built-in template nor a file"),
    ):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err
    assert main(words[:2]) == 2
    told = capsys.readouterr().err
    assert "--seq-length=None: is needed" in told
    assert "--tokenizer-model=None: chats need a tokenizer" in told

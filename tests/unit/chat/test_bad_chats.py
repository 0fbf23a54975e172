"""Broken files: what each fault says, with file and line, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chats import chat, make_tokenizer, write_lines

from lightning_megatron import ChatDataModule, ConfigError
from lightning_megatron.data import DataError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
SHAPES = '; write {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}'


def of(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


LINES: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"messages": [', "not JSON (Expecting value: line 1 column 15 (char 14)); every line must be one"),
    "a list": ("[1]", f"a JSON list, not an object{SHAPES}"),
    "no known key": ({"text": "Hi"}, "has neither 'messages' nor 'prompt' and 'completion', its keys are: 'text'; "),
    "two shapes": ({**chat("a", "b"), "prompt": "a"}, "has both 'messages' and 'prompt' or 'completion'; write"),
    "no completion": ({"prompt": "Hi"}, "has no 'completion'; write"),
    "a prompt of messages": (
        {"prompt": [USER], "completion": "Ho"},
        "'prompt' is a list, not text; conversations of several messages stand under \"messages\"",
    ),
    "messages that are text": ({"messages": "Hi"}, f"'messages' is text, not a list of messages{SHAPES}"),
    "no messages": ({"messages": []}, "'messages' is an empty list, not a list of messages"),
    "a message that is text": (of("Hi"), 'message 1 is text, not an object; write {"role": ..., "content": ...}'),
    "no role": (
        of({"content": "Hi"}, ANSWER),
        "message 1 has no 'role'; it has 'content'; roles are system, developer, user, assistant, tool",
    ),
    "another dialect": (
        of({"from": "human", "value": "Hi"}),
        "message 1 has no 'role'; it has 'from', 'value'; roles are",
    ),
    "an unknown role": (
        of(USER, {"role": "asistant", "content": "Ho"}),
        "message 2 has the role 'asistant'; nearest known: assistant",
    ),
    "the assistant first": (
        of(ANSWER),
        "message 1 has the role 'assistant' and is the first one, where 'system' or 'developer' or 'user' is expected;"
        " put the messages in order",
    ),
    "two users": (
        of(USER, USER, ANSWER),
        "message 2 has the role 'user' and follows role 'user', where 'assistant' is expected; join messages of one",
    ),
    "a late system": (
        of(USER, ANSWER, {"role": "system", "content": "Be brief."}, USER, ANSWER),
        "message 3 has the role 'system' and follows role 'assistant', where 'user' or 'tool' is expected; put the",
    ),
    "no answer": (
        of(USER),
        "ends with role 'user', whose text is not learnt; end with a message of the assistant, or cut",
    ),
    "no content": (of({"role": "user"}, ANSWER), "message 1 (user) has no 'content'; give it text"),
    "an empty answer": (
        of(USER, {"role": "assistant", "content": " \n"}),
        "message 2 is an empty answer of the assistant; remove the conversation, or what follows",
    ),
    "a number for text": (
        of({"role": "user", "content": 3}, ANSWER),
        'the \'content\' of message 1 is a number, not text; write "content": "..."',
    ),
    "an image": (
        of({"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER),
        "the 'content' of message 1 has a part of the kind 'image'; only parts of text can be learnt",
    ),
    **{
        f"a turn with {key}": (
            of(USER, {**ANSWER, key: value}),
            f"message 2 has {key!r}, which would be ignored: the chat template does not read it; remove it; all",
        )
        for key, value in {
            "weight": 0,
            "train": False,
            "masked": True,
            "step_loss_mask": 0,
            "function_call": "f",
        }.items()
    },
    **{
        f"a record with {key}": (
            {**(of(USER, ANSWER) if key != "history" else {"prompt": "Hi", "completion": "Ho"}), key: value},
            f"has {key!r}, which would be ignored; a system prompt is a message; variables of the template stand under",
        )
        for key, value in {"system": "S", "history": [["a", "b"]], "functions": [{}], "loss_mask": [0, 1]}.items()
    },
    "a variable that is not read": (
        of(USER, ANSWER, chat_template_kwargs={"note": "S"}),
        "gives 'note', which the chat template does not read; remove it",
    ),
    "documents": (of(USER, ANSWER, documents=[{"text": "S"}]), "gives 'documents', which the chat template does not"),
    "variables in a list": (
        of(USER, ANSWER, chat_template_kwargs=["note"]),
        "'chat_template_kwargs' is a list, not an object; give variables by name",
    ),
    "half a character": (
        '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "Ho"}]}',
        "message 1 holds half a character ('\\ud83d'); repair or remove the line",
    ),
    "no list of tools": (
        of(USER, ANSWER, tools="weather"),
        "'tools' is text, not a list of objects; give each tool's JSON schema, or no tools",
    ),
    "a tool's answer": (
        of(USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "1"}, ANSWER),
        "message 2 calls a tool or answers for one, and the built-in template 'chatml' writes text alone; take the",
    ),
    "tools": (of(USER, ANSWER, tools=[{"name": "f"}]), "describes tools, and the built-in template 'chatml' writes"),
    "reasoning": (of(USER, {**ANSWER, "thinking": "hm"}), "message 2 has reasoning beside its text, and the built-in"),
    "a mark": (of({**USER, "content": "\ufdd1"}, ANSWER), "holds U+FDD0 or U+FDD1, which are no characters; remove"),
    "too long": (
        chat("Hi", "Ho " * 100),
        'a conversation of 321 tokens for seq_length=64; raise seq_length, or set too_long="cut" or too_long="drop"',
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def module(tokenizer: Path, file: Any, **options: Any) -> ChatDataModule:
    return ChatDataModule(file, tokenizer, **{"seq_length": 64, "chat_template": "chatml", **options})


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_names_file_line_fault_and_remedy(tmp_path: Path, tokenizer: Path, name: str):
    record, text = LINES[name]
    file = write_lines(tmp_path / "chats.jsonl", [chat("Hi", "Ho"), "", record, chat("Hi", "Ho")])
    with pytest.raises(DataError) as raised:
        module(tokenizer, file).prepare_data()
    assert str(raised.value).startswith(f"{file}, line 3: {text}")


def test_the_longest_of_several_that_are_too_long_is_named(tmp_path: Path, tokenizer: Path):
    long, longer = chat("Hi", "Ho " * 60), chat("Hi", "Ho " * 100)
    file = write_lines(tmp_path / "chats.jsonl", [long, longer, chat("Hi", "Ho")])
    with pytest.raises(DataError, match=r"line 2: a conversation of 321 tokens, the longest of 2 that are too long"):
        module(tokenizer, file).prepare_data()


def test_a_template_that_refuses_a_conversation_is_quoted_with_the_line(tmp_path: Path, tokenizer: Path):
    text = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    text += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    file = write_lines(tmp_path / "chats.jsonl", [chat("Hi", "Ho"), chat("Hi", "Ho", system="S")])
    with pytest.raises(DataError) as raised:
        module(tokenizer, file, chat_template=text).prepare_data()
    assert str(raised.value) == (
        f"{file}, line 2: the chat template given as text refuses the conversation (no system here); repair or remove"
        " the line, or take another chat_template"
    )


def test_a_template_that_marks_nothing_is_told_with_the_line(tmp_path: Path, tokenizer: Path):
    text = (
        "{% for m in messages %}{% if m.role == 'model' %}{% generation %}x{% endgeneration %}{% endif %}{% endfor %}"
    )
    file = write_lines(tmp_path / "chats.jsonl", [chat("Hi", "Ho")])
    with pytest.raises(DataError, match="line 1: the chat template given as text marks nothing of the conversation"):
        module(tokenizer, file, chat_template=text).prepare_data()


def test_files_are_checked_before_processes_start(tmp_path: Path, tokenizer: Path):
    good = write_lines(tmp_path / "good.jsonl", [chat("Hi", "Ho")])
    empty = write_lines(tmp_path / "empty.jsonl", [])
    bad = write_lines(tmp_path / "bad.jsonl", [of(USER)])
    data = module(tokenizer, [good, tmp_path / "absent.jsonl"], val_files=empty, test_files=bad)
    found = [str(problem) for problem in data.data_problems()]
    assert found[0] == f"files='{tmp_path / 'absent.jsonl'}': no such file"
    assert found[1].startswith(f"val_files='{empty}': holds no conversation; give one JSON object a line")
    assert found[2].startswith(f"test_files='{bad}': line 1: ends with role 'user'")
    assert len(found) == 3


def test_an_epoch_without_a_conversation_is_an_error(tmp_path: Path, tokenizer: Path):
    file = write_lines(tmp_path / "chats.jsonl", [chat("Hi " * 100, "Ho")])
    for rule, text in (("drop", "(1 too long, 0 without"), ("cut", "(0 too long, 1 without an answer if cut)")):
        with pytest.raises(DataError) as raised:
            module(tokenizer, file, too_long=rule).prepare_data()
        assert str(raised.value).startswith(f"{file}: no conversation is left {text}")


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a weight alone": (
        {"files": [(0.5, "a.jsonl", "b.jsonl")]},
        "is not a file, a list of files, or a list of (weight, f",
    ),
    "pairs the wrong way": ({"files": [("a.jsonl", 0.5)]}, "files=[('a.jsonl', 0.5)]: is not a file, a list"),
    "a mixture of both": (
        {"files": [(0.5, "a.jsonl"), "b.jsonl"]},
        "is not a file, a list of files, or a list of (weight",
    ),
    "no weight": ({"files": [(0, "a.jsonl")]}, "every weight must be a positive number"),
    "no files": ({"files": []}, "files=[]: is not a file, a list of files"),
    "another rule": ({"too_long": "truncate"}, "too_long='truncate': unknown; nearest valid: error, cut, drop"),
    "a share of one": ({"val_share": 1.0}, "val_share=1.0: must be a finite number of at least 0.0 and less than 1.0"),
    "two validations": (
        {"val_share": 0.1, "val_files": "v.jsonl"},
        "val_share=0.1: validation data have files of their own: give one of val_share and val_files; nearest",
    ),
    "no length": ({"seq_length": 1}, "seq_length=1: must be a whole number of at least 2; nearest valid: 2"),
    "another name": ({"max_seq_length": 8}, "no such argument of ChatDataModule; nearest valid: seq_length"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_work_are_told_at_once(tokenizer: Path, name: str):
    given, text = ARGUMENTS[name]
    with pytest.raises(ConfigError) as raised:
        module(tokenizer, **{"file": "a.jsonl", **given} if "files" not in given else {"file": given["files"]})
    assert text in str(raised.value)


def test_a_tokenizer_without_its_file_says_what_to_give(tmp_path: Path):
    with pytest.raises(DataError, match=r"no such file; only local files are read: give a directory with tokenizer"):
        ChatDataModule("a.jsonl", tmp_path / "absent", 64, chat_template="chatml")

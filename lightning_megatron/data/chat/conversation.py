"""Conversations in JSON lines, checked line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.data.preprocessing.textfiles import read_lines
from lightning_megatron.errors import DataError, nearest_names

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. An assistant's text is what a model learns."""

_FIRST = ("system", "developer")
_FOLLOWS: Mapping[str | None, Sequence[str]] = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Roles that may follow a role; those of a first message follow ``None``."""

_OF_TURNS = {"role", "content", "name", "tool_calls"}
_OF_RECORDS = {"messages", "prompt", "completion", "tools", "documents", "chat_template_kwargs"}
_METADATA = re.compile(
    r"(.*_)?id|uuid|idx|index|source|dataset|origin|url|license|lang|language|category|topic|task|tags|split|meta"
    r"|metadata|timestamp|created|created_at|date|model|version|hash"
)
"""Keys that describe a record or a turn, and change no training anywhere."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_HALF = re.compile("[\ud800-\udfff]")
_SHAPES = 'write {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "completion": "..."}'


class ChatError(ValueError):
    """A fault of one conversation; the reader of its file adds file and line."""

    def __init__(self, fault: str, do: str) -> None:
        super().__init__(fault)
        self.do = do

    def at(self, path: str | Path, line: int) -> DataError:
        """The error that names file and line."""
        return DataError.at(path, str(self), line=line, do=self.do)


@dataclass(frozen=True)
class Conversation:
    """One conversation that can be trained on.

    Attributes:
        messages: messages in order; the last one is the assistant's.
        tools: descriptions of the tools that the assistant may call, as JSON schemas; ``None`` without any.
        line: one-based line in its file.
        variables: further variables for the template, which must read them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    line: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)

    def refuse_unread(self, variables: Container[str], keys: Container[str]) -> None:
        """Raise if a template would ignore something of the conversation.

        Args:
            variables: names of the variables that the template reads.
            keys: names of the keys of messages that it reads.

        Raises:
            ChatError: naming the first thing that it does not read.
        """
        if unread := next((name for name in self.variables if name not in variables), None):
            raise ChatError(f"gives {unread!r}, which the chat template does not read", "remove it")
        for number, message in enumerate(self.messages, 1):
            known = _OF_TURNS.union(_REASONING)
            unread = next((key for key in _not_metadata(message) if key not in known and key not in keys), None)
            if unread is not None:
                fault = f"message {number} has {unread!r}, which would be ignored: the chat template does not read it"
                do = "remove it; all answers count the same, so cut conversations where those that count begin"
                raise ChatError(fault, do)


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Conversations of a file of JSON lines, which may be compressed.

    Raises:
        DataError: naming file and line of the first one that is broken, or a file without any.
    """
    found = False
    for line, content in read_lines(path):
        found = True
        try:
            yield parse_conversation(_object(content), line)
        except ChatError as fault:
            raise fault.at(path, line) from None
    if not found:
        raise DataError.at(path, "holds no conversation", do="give one JSON object a line")


def parse_conversation(record: Mapping[str, Any], line: int = 0) -> Conversation:
    """Check one record.

    Args:
        record: ``{"messages": [...]}`` or ``{"prompt": ..., "completion": ...}``, perhaps with ``"tools"``, with
            ``"documents"`` and ``"chat_template_kwargs"``, which are variables of the template, and with metadata.
        line: its line.

    Raises:
        ChatError: naming the first message at fault.
    """
    if ("messages" in record) == ("prompt" in record or "completion" in record):
        both = "both 'messages' and 'prompt' or 'completion'" if "messages" in record else "neither 'messages' nor"
        keys = ", ".join(map(repr, record)) or "none"
        fault = f"has {both}" if "messages" in record else f"has {both} 'prompt' and 'completion', its keys are: {keys}"
        raise ChatError(fault, _SHAPES)
    messages = record["messages"] if "messages" in record else _messages_of_prompt(record)
    if not isinstance(messages, list) or not messages:
        raise ChatError(f"'messages' is {_kind(messages)}, not a list of messages", _SHAPES)
    before: str | None = None
    checked = []
    for number, message in enumerate(messages, 1):
        checked.append(_checked(message, f"message {number}", before))
        before = checked[-1]["role"]
    if before != "assistant":
        fault = f"ends with role {before!r}, whose text is not learnt"
        raise ChatError(fault, "end with a message of the assistant, or cut the conversation after one")
    return Conversation(checked, _tools(record), line, _variables(record))


def _not_metadata(given: Mapping[str, Any]) -> Iterator[str]:
    """Keys that say something, and may change what is learnt."""
    empty: tuple[Any, ...] = (None, "", [], {})
    return (key for key, value in given.items() if value not in empty and not _METADATA.fullmatch(key))


def _variables(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables for the template in a record."""
    if unread := next((key for key in _not_metadata(record) if key not in _OF_RECORDS), None):
        do = "a system prompt is a message; variables of the template stand under 'chat_template_kwargs', notes under"
        raise ChatError(f"has {unread!r}, which would be ignored", f"{do} 'metadata'")
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ChatError(f"'chat_template_kwargs' is {_kind(variables)}, not an object", "give variables by name")
    return {**variables, "documents": record["documents"]} if record.get("documents") else variables


def _object(content: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(content.strip())  # places in its errors are those in the line
    except (ValueError, RecursionError) as error:
        raise ChatError(f"not JSON ({error})", "every line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ChatError(f"a JSON {type(record).__name__}, not an object", _SHAPES)
    return record


def _messages_of_prompt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    for key in ("prompt", "completion"):
        if key not in record:
            raise ChatError(f"has no {key!r}", _SHAPES)
        if not isinstance(record[key], str):
            fault = f"{key!r} is {_kind(record[key])}, not text"
            raise ChatError(fault, 'conversations of several messages stand under "messages"')
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]


def _checked(message: Any, name: str, before: str | None) -> dict[str, Any]:
    """A message that may follow one of role ``before``; values of ``None`` are left out, as if they were not there."""
    if not isinstance(message, dict):
        raise ChatError(f"{name} is {_kind(message)}, not an object", 'write {"role": ..., "content": ...}')
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role is None:
        others = f"; it has {', '.join(map(repr, given))}" if given else ""
        raise ChatError(f"{name} has no 'role'{others}", f"roles are {', '.join(ROLES)}")
    if role not in ROLES:
        near = ", ".join(nearest_names(role, ROLES)) if isinstance(role, str) else ", ".join(ROLES)
        raise ChatError(f"{name} has the role {role!r}", f"nearest known: {near}")
    if role not in _FOLLOWS[before]:
        place = "is the first one" if before is None else f"follows role {before!r}"
        allowed = " or ".join(map(repr, _FOLLOWS[before]))
        do = "join messages of one role into one" if role == before else "put the messages in order"
        raise ChatError(f"{name} has the role {role!r} and {place}, where {allowed} is expected", do)
    _check_text(given, name)
    return _with_reasoning(given)


def _check_text(message: Mapping[str, Any], name: str) -> None:
    """Raise if a message has no text where there must be some, or text that no tokenizer can read."""
    content, role = message.get("content"), message["role"]
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and not calls:
        raise ChatError(f"{name} ({role}) has no 'content'", "give it text")
    text = "" if content is None else _text(content, name)
    if role == "assistant" and not text.strip() and not calls:
        raise ChatError(f"{name} is an empty answer of the assistant", "remove the conversation, or what follows")
    if not text.isascii() and (half := _HALF.search(text)):
        raise ChatError(f"{name} holds half a character ({half[0]!a})", "repair or remove the line")


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"the 'content' of {name} is {_kind(content)}, not text", 'write "content": "..."')
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            fault = f"the 'content' of {name} has a part of the kind {kind!r}"
            raise ChatError(fault, 'only parts of text can be learnt: {"type": "text", "text": "..."}')
    return "".join(part["text"] for part in content)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Let a template find the reasoning of a message under every name that is in use."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tools(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ChatError(
            f"'tools' is {_kind(tools)}, not a list of objects", "give each tool's JSON schema, or no tools"
        )
    return tools or None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an empty list" if value == [] else "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")

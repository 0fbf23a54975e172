"""Chat templates: a conversation as text, and the parts of it that the assistant has written.

Templates are Jinja, as in tokenizers of Hugging Face. The output of a ``{% generation %}`` block is the assistant's:
each block writes a mark before and after its output, and the marks are located and removed after rendering. Templates
come from other parties, so they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightning_megatron.data.chat.conversation import ChatError, Conversation
from lightning_megatron.errors import ConfigError, Problem

_BEGIN, _END = "\ufdd0", "\ufdd1"  # code points that Unicode will never make characters
_MARKS = re.compile(f"([{_BEGIN}{_END}])")
_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the text, special tokens written out.
        spans: (begin, end) in characters of the parts that the assistant has written, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TemplateSource:
    """A template that is not compiled yet.

    Attributes:
        text: Jinja source.
        name: name of a built-in template, or the file that it stands in, for messages.
        only_text: True if it would silently leave out tools and tool calls.
        tokens: pieces that the tokenizer must have as tokens of their own.
        variables: names of special tokens that the tokenizer must have.
    """

    text: str
    name: str
    only_text: bool = False
    tokens: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


class ChatTemplate:
    """A template with the values of its variables.

    Args:
        source: the template.
        variables: values by name: the tokenizer's special tokens, and what the user gives.

    Raises:
        ConfigError: if it is no template, or has no ``{% generation %}`` marks.
    """

    def __init__(self, source: TemplateSource, variables: Mapping[str, Any]) -> None:
        self.source, self.variables = source, dict(variables)
        try:
            environment = _environment()
            self._compiled = environment.from_string(source.text)
            tree = environment.parse(source.text)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f"line {line}: "
            raise ConfigError([Problem("chat_template", source.name, f"is no template ({place}{error})")]) from None
        if not _BLOCK.search(source.text):
            reason = (
                "has no {% generation %} marks, so it is not known which tokens the assistant writes: put"
                " {% generation %} and {% endgeneration %} around them in a copy, or name a built-in template"
            )
            raise ConfigError([Problem("chat_template", source.name, reason)])
        self._reads, self._keys = find_undeclared_variables(tree), _keys_in(tree)

    def __reduce__(self) -> tuple[object, ...]:
        return ChatTemplate, (self.source, self.variables)  # compiled code cannot be copied to other processes

    def text_beside(self, special: Mapping[str, str]) -> str:
        """The template as text that gives its variables their values, but for special tokens with these ``special``."""
        given = {name: value for name, value in self.variables.items() if special.get(name) != value}
        return "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in given.items()) + self.source.text

    def render(self, chat: Conversation) -> Rendered:
        """Text of a conversation, with the parts that the assistant has written.

        Raises:
            ChatError: if the template refuses the conversation, or nothing in its text is the assistant's.
        """
        if self.source.only_text and (fault := _beyond_text(chat)):
            do = "take the chat template of a tokenizer that knows tools"
            raise ChatError(f"{fault}, and the built-in template {self.source.name!r} writes text alone", do)
        chat.refuse_unread(self._reads, self._keys)
        given = {"documents": None, **self.variables, **chat.variables, "messages": chat.messages, "tools": chat.tools}
        try:
            marked = self._compiled.render(**{"add_generation_prompt": False, **given})
        except Exception as error:  # a template may do anything, and it is the line that must be named
            fault = f"the chat template {self.source.name} refuses the conversation ({error or type(error).__name__})"
            raise ChatError(fault, "repair or remove the line, or take another chat_template") from None
        rendered = _without_marks(marked)
        if not any(end > begin for begin, end in rendered.spans):
            fault = f"the chat template {self.source.name} marks nothing of the conversation as the assistant's"
            raise ChatError(fault, "check its {% generation %} blocks")
        return rendered


def _keys_in(tree: nodes.Template) -> set[str]:
    """Names of the keys that a template reads: ``message.name``, ``message['name']``, ``message.get('name')``."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    parts = [node.arg for node in tree.find_all(nodes.Getitem)]
    parts += [argument for node in tree.find_all(nodes.Call) for argument in node.args]
    return names | {part.value for part in parts if isinstance(part, nodes.Const) and isinstance(part.value, str)}


def _beyond_text(chat: Conversation) -> str | None:
    if chat.tools:
        return "describes tools"
    for number, message in enumerate(chat.messages, 1):
        if message.get("tool_calls") or message["role"] == "tool":
            return f"message {number} calls a tool or answers for one"
        if "reasoning_content" in message:
            return f"message {number} has reasoning beside its text"
        if not isinstance(message.get("content"), str):
            return f"message {number} is a list of parts"
    return None


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: a scope of its own, between two marks."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Nodes of a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(text: str) -> nodes.Node:
            return nodes.Output([nodes.TemplateData(text)], lineno=line)

        return [mark(_BEGIN), nodes.Scope(body, lineno=line), mark(_END)]


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers runs templates, without today's date.

    Data must not depend on the day, so there is no ``strftime_now``: templates that work without it take a fixed date,
    or one that is given as a variable.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = as_json  # Jinja's own would escape HTML
    return environment


def _without_marks(marked: str) -> Rendered:
    """Remove the marks from a rendered text.

    Raises:
        ChatError: if they do not come in pairs: then the conversation itself contains one.
    """
    pieces, spans, opened, length = [], [], [], 0
    for piece in _MARKS.split(marked):
        if piece == _BEGIN:
            opened.append(length)
        elif piece == _END and opened:
            spans.append((opened.pop(), length))
        elif piece == _END:
            opened.append(-1)
            break
        else:
            pieces.append(piece)
            length += len(piece)
    if opened:
        raise ChatError("holds U+FDD0 or U+FDD1, which are no characters", "remove them")
    return Rendered("".join(pieces), tuple(sorted(spans)))

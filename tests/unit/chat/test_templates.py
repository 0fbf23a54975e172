"""Tokens and loss masks of conversations against transformers' own, and what templates may do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from chats import CHATS, SPECIAL, chat, make_tokenizer, write_lines
from transformers import AutoTokenizer

from lightning_megatron import ChatDataModule, ConfigError
from lightning_megatron.data.chat.builtin import BUILTIN_TEMPLATES
from lightning_megatron.data.chat.conversation import ChatError, parse_conversation
from lightning_megatron.data.chat.template import ChatTemplate, TemplateSource

TOOL_CHAT = {
    "messages": [
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome <&>"}}}],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "reasoning": "it says so", "content": "It is sunny."},
    ],
    "tools": [{"name": "weather", "parameters": {"city": {"type": "string"}}}],
}
CARRIED = {
    "tools, reasoning, namespace and loop controls": """
{%- set seen = namespace(users=0) -%}
{%- if tools is not none %}{{ '<|im_start|>tools\n' }}{%- for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{{ '<|im_end|>' }}{%- endif %}
{%- for message in messages -%}
  {%- if message.role == 'system' %}{% continue %}{% endif -%}
  {%- if message['role'] == 'user' -%}
    {%- set seen.users = seen.users + 1 -%}
    {{ '<|im_start|>user ' ~ seen.users ~ '\n' ~ message['content'] ~ '<|im_end|>\n' }}
  {%- elif message.role == 'tool' -%}
    {{ '<|im_start|>tool\n' + message.content + '<|im_end|>\n' }}
  {%- else -%}
    {{ '<|im_start|>assistant\n' }}
    {%- generation -%}
    {%- if message.reasoning_content is defined %}{{ '(' + message.reasoning_content + ')' }}{% endif -%}
    {%- if message.content %}{{ message.content }}{% endif -%}
    {%- for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}{% endfor -%}
    {{ '<|im_end|>' }}
    {%- endgeneration -%}
    {{ '\n' }}
  {%- endif -%}
{%- endfor -%}""",
    "only the last answer": """{{ bos_token }}{% for m in messages %}
{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}[{{ m.role }}]: {{ m.content }}
{% endif %}{% endfor %}""",
    "a variable": """{% for m in messages %}{{ greeting ~ m.role ~ ':' }}{% if m.role == 'assistant' %}
{%- generation %}{% set text = m.content.strip() %}{{ text }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}""",
}


def both(
    folder: Path, records: list[dict[str, Any]], kind: str, template: str | None, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Tokens and masks of conversations, by us and by transformers."""
    tokenizer = folder / f"tokenizer-{kind}"
    if not tokenizer.exists():
        make_tokenizer(tokenizer, kind)
    file = write_lines(folder / "chats.jsonl", records)
    variables = options.get("template_variables") or {}
    data = ChatDataModule(file, tokenizer, 4096, chat_template=template, cache_dir=folder / "cache", **options)
    rows = data.rows()
    assert rows is not None
    assert len(rows) == 1
    order = [line for _, line in rows.place(0)]
    documents = dict(zip(order, rows.documents(0), strict=True))
    ours = [(ids.tolist(), mask.astype(int).tolist()) for _, (ids, mask) in sorted(documents.items())]
    their = AutoTokenizer.from_pretrained(tokenizer)
    text = BUILTIN_TEMPLATES[template].text if template in BUILTIN_TEMPLATES else template
    theirs = []
    for record in records:
        encoded = their.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=text,
            tokenize=True,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **variables,
        )
        theirs.append((encoded["input_ids"], encoded["assistant_masks"]))
    return ours, theirs


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_built_in_templates_give_the_tokens_and_masks_of_transformers(tmp_path: Path, name: str, kind: str):
    ours, theirs = both(tmp_path, CHATS, kind, name)
    assert ours == theirs
    assert all(0 < sum(mask) < len(mask) for _, mask in ours)


@pytest.mark.parametrize("name", CARRIED)
def test_templates_that_tokenizers_carry_give_the_tokens_and_masks_of_transformers(tmp_path: Path, name: str):
    folder = make_tokenizer(tmp_path / "tokenizer-bytes")
    (folder / "chat_template.jinja").write_text(CARRIED[name])
    records = [*CHATS, TOOL_CHAT] if "tools" in name else CHATS
    options = {"template_variables": {"greeting": "Dear "}} if "variable" in name else {}
    ours, theirs = both(tmp_path, records, "bytes", None, **options)
    assert ours == theirs
    assert all(0 < sum(mask) < len(mask) for _, mask in ours)


def test_a_template_may_stand_in_the_tokenizers_configuration_also_with_others(tmp_path: Path):
    folder = make_tokenizer(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    file = write_lines(tmp_path / "chats.jsonl", CHATS)
    one = CARRIED["only the last answer"]
    for value in (one, [{"name": "default", "template": one}, {"name": "rag", "template": "other"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        data = ChatDataModule(file, folder, 512)
        assert data.encoder.template.source.text == one
    assert data.encoder.template.variables["eos_token"] == "</s>"


def test_a_token_that_reaches_beyond_the_answer_counts_and_dropped_space_does_not_carry_the_mask_away(tmp_path: Path):
    """Older versions of transformers mark all that follows such an answer, of the user too."""
    folder = make_tokenizer(tmp_path / "tokenizer", "words")
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}\n{% endgeneration %}"
    text += "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    file = write_lines(tmp_path / "chats.jsonl", [chat("a b", "c d", "e f", "g")])
    rows = ChatDataModule(file, folder, 16, chat_template=text).rows()
    assert rows is not None
    ((_, mask),) = rows.documents(0)
    assert mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("answer", ["Done", "Done \U0001f44d", "\u597d", "caf\u00e9", "\u00e9 \u597d"])
@pytest.mark.parametrize("end", ["", "<|end|>"])
def test_an_answer_is_learnt_to_the_last_byte_of_its_last_character(tmp_path: Path, answer: str, end: str):
    folder = make_tokenizer(tmp_path / "tokenizer", "bytes")
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}" + end
    text += "{% endgeneration %}<|user|>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    file = write_lines(tmp_path / "chats.jsonl", [chat("Hi", answer, "\U0001f44d", "Ho")])
    data = ChatDataModule(file, folder, 64, chat_template=text)
    rows = data.rows()
    assert rows is not None
    ((ids, mask),) = rows.documents(0)
    assert data.encoder.tokenizer.decode_whole(ids[mask]) == f"{answer}{end}Ho{end}"


def test_a_template_gets_the_same_date_tomorrow():
    text = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul 2024{% endif %}"
    text += "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    template = ChatTemplate(TemplateSource(text, "dated"), {})
    rendered = template.render(parse_conversation(chat("a", "b")))
    assert rendered.text == "26 Jul 2024ab"
    assert rendered.spans == ((11, 12), (12, 13))
    assert pickle.loads(pickle.dumps(template)).render(parse_conversation(chat("a", "b"))) == rendered


@pytest.mark.parametrize("read", ["m.note", "m['note']", "m.get('note')"])
def test_a_template_gets_the_variables_of_a_record_and_every_key_of_a_turn_that_it_reads(read: str):
    """As ``apply_chat_template(messages, documents=..., **chat_template_kwargs)`` of transformers renders them."""
    text = "{{ style }}{{ documents[0].text }}{% for m in messages %}{% generation %}"
    text += f"{{{{ {read} or '' }}}}{{{{ m.content }}}}{{% endgeneration %}}{{% endfor %}}"
    record = chat("a", "b") | {"chat_template_kwargs": {"style": "S"}, "documents": [{"text": "D"}], "source": "web"}
    record["messages"][1] |= {"note": "N", "timestamp": 3}
    template = ChatTemplate(TemplateSource(text, "own"), {"style": "of the job"})
    assert template.render(parse_conversation(record)).text == "SDaNb"


def test_a_template_cannot_leave_its_sandbox():
    text = "{{ messages.__class__.__mro__ }}{% generation %}a{% endgeneration %}"
    with pytest.raises(ChatError, match=r"refuses the conversation .*unsafe"):
        ChatTemplate(TemplateSource(text, "bad"), {}).render(parse_conversation(chat("a", "b")))


def test_a_prompt_with_its_completion_is_a_question_with_its_answer():
    asked = parse_conversation({"prompt": "Hi", "completion": "Ho", "id": 3})
    assert asked.messages == parse_conversation(chat("Hi", "Ho")).messages


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("chatmml", "chat_template='chatmml': is neither a built-in template nor a file; nearest valid: chatml"),
        ("no/such.jinja", "chat_template='no/such.jinja': no such file; nearest valid: chatml, llama3, mistral"),
        ("{% for m in messages %}{{ m }}", "is no template (line 1: Unexpected end of template"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "has no {% generation %} marks, so it is not known which tokens the assistant writes: put {% generation %}"
            " and {% endgeneration %} around them in a copy, or name a built-in template",
        ),
        (None, "carries no chat template: name a built-in one, or a .jinja file; nearest valid: chatml, llama3"),
        (
            "llama3",
            "chat_template='llama3': the tokenizer lacks <|eot_id|>, a bos_token, which it writes; nearest valid:"
            " chatml, zephyr, phi3",
        ),
    ],
)
def test_a_template_that_cannot_work_is_told_before_anything_is_read(tmp_path: Path, given: str | None, text: str):
    special = [token for token in SPECIAL if token != "<|eot_id|>"]
    folder = make_tokenizer(tmp_path / "tokenizer", special=special, bos_token=None)
    with pytest.raises(ConfigError) as raised:
        ChatDataModule("absent.jsonl", folder, 64, chat_template=given)
    assert text in str(raised.value)

"""Chat templates by name with ``{% generation %}`` marks, for tokenizers whose own template has none.

Each renders the text that models of that name were tuned on. The loss covers an answer and the token that ends it.
"""

from __future__ import annotations

from lightning_megatron.data.chat.template import TemplateSource

_SYSTEM_IN_FIRST = """\
{% set chat = messages %}
{% set before = '' %}
{% if messages[0].role in ('system', 'developer') %}
{% set chat = messages[1:] %}
{% set before = messages[0].content | trim + '\\n\\n' %}
{% endif %}
"""

_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{% else %}
{{ message.content + '<|im_end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{% else %}
{{ message.content | trim + '<|eot_id|>' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

_MISTRAL = (
    _SYSTEM_IN_FIRST
    + """\
{{ bos_token }}
{%- for message in chat %}
{% if message.role == 'assistant' %}
{{ ' ' }}
{%- generation %}{{ message.content | trim + eos_token }}{% endgeneration %}
{% else %}
{{ '[INST] ' + (before if loop.first else '') + message.content + '[/INST]' }}
{%- endif %}
{% endfor %}
"""
)

_GEMMA = (
    _SYSTEM_IN_FIRST
    + """\
{{ bos_token }}
{%- for message in chat %}
{% if message.role == 'assistant' %}
{{ '<start_of_turn>model\\n' }}
{%- generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}
{% else %}
{{ '<start_of_turn>user\\n' + (before if loop.first else '') + message.content | trim + '<end_of_turn>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
)

_ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{% else %}
{{ message.content + eos_token }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

_PHI3 = """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{% else %}
{{ message.content + '<|end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""


def _text_template(name: str, text: str, *tokens: str, variables: tuple[str, ...] = ()) -> TemplateSource:
    return TemplateSource(text, name, True, tokens, variables)


BUILTIN_TEMPLATES: dict[str, TemplateSource] = {
    source.name: source
    for source in (
        _text_template("chatml", _CHATML, "<|im_start|>", "<|im_end|>"),
        _text_template(
            "llama3", _LLAMA3, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", variables=("bos_token",)
        ),
        _text_template("mistral", _MISTRAL, "[INST]", "[/INST]", variables=("bos_token", "eos_token")),
        _text_template("gemma", _GEMMA, "<start_of_turn>", "<end_of_turn>", variables=("bos_token",)),
        _text_template("zephyr", _ZEPHYR, variables=("eos_token",)),
        _text_template("phi3", _PHI3, "<|user|>", "<|assistant|>", "<|end|>"),
    )
}
"""Built-in templates by name."""

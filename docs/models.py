"""Write docs/models.md from the presets: ``python docs/models.py``; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.families import FAMILIES
from lightning_megatron.models.presets import PRESETS

PAGE = Path(__file__).parent / "models.md"
COLUMNS = ("preset", "module", "parameters", "layers", "hidden", "heads (key/value)", "ffn", "vocabulary", "positions")
HEAD = """\
<!-- made from the presets by `python docs/models.py` -->
# Models and presets

A preset is a shape; weights are [loaded](hugging-face.md) or trained. Any field can be changed behind its name, and a
`TransformerConfig` or a mapping of its fields goes wherever a name goes:

```python
module = LlamaModule("llama3.1-8b", lr=1e-4, num_layers=16)
print(module.config.num_parameters())
```

"""
FOOT = """
Parameters are counted without the padding of the vocabulary; of a mixture of experts, in brackets, those that a token
visits. What carries over from a Hugging Face configuration: [Hugging Face models](hugging-face.md#what-carries-over).
For contexts longer than those of the pretraining, `rope_scaling={"kind": "yarn", "factor": 4.0,
"original_max_position_embeddings": 8192}` slows the angles of positions; other kinds are `linear`, `dynamic`, `llama3`.
A preset of your own is one line in a file of `lightning_megatron/families/`.
"""

APACHE, GEMMA = "Apache-2.0", "Gemma Terms of Use"
LICENCES = {
    "bert-": (APACHE, "google-bert/bert-base-uncased"),
    "bloom-": ("BigScience RAIL 1.0, which limits the use", "bigscience/bloom"),
    "deepseek-v2": ("DeepSeek Model License, which limits the use", "deepseek-ai/DeepSeek-V2"),
    "deepseek-v3": ("DeepSeek Model License, which limits the use", "deepseek-ai/DeepSeek-V3"),
    "gemma2-": (GEMMA, "google/gemma-2-9b"),
    "gemma3-": (GEMMA, "google/gemma-3-4b-pt"),
    "glm4.5": ("MIT", "zai-org/GLM-4.5"),
    "gpt-oss-": (APACHE, "openai/gpt-oss-20b"),
    "gpt2": ("MIT, modified", "openai-community/gpt2"),
    "gpt3-": ("", ""),
    "llama2-": ("Llama 2 Community License, and a use policy", "meta-llama/Llama-2-7b-hf"),
    "llama3.": ("Llama 3.1 or 3.2 Community License, and a use policy", "meta-llama/Llama-3.1-8B"),
    "megatron-bert-": ("terms of NVIDIA's NGC catalog", "nvidia/megatron-bert-cased-345m"),
    "mistral-": (APACHE, "mistralai/Mistral-7B-v0.1"),
    "mixtral-": (APACHE, "mistralai/Mixtral-8x7B-v0.1"),
    "qwen2.5-": (APACHE, "Qwen/Qwen2.5-7B"),
    "qwen3-": (APACHE, "Qwen/Qwen3-8B"),
    "t5-": (APACHE, "google-t5/t5-base"),
}
"""Licence and card of the weights that are published for presets, by the beginning of their names."""
TERMS = """
## Licences of weights

A preset is a shape and needs no licence. Weights have their owners' terms, which you accept by downloading them; read
the card (a name on the Hugging Face hub) of the model that you take, since sizes of one family may differ.

| presets | licence of the published weights | card |
| --- | --- | --- |
"""


def page() -> str:
    """docs/models.md as it must be."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, sorted(PRESETS, key=_place))]
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + FOOT + TERMS + _terms()


def _terms() -> str:
    without = [name for name in PRESETS if not name.endswith("-tiny") and not name.startswith(tuple(LICENCES))]
    assert not without, f"{without}: no licence in docs/models.py"
    none = ("none published", "")
    rows = [
        (f"`{name}*`", *((terms, f"`{card}`") if terms else none))
        for name, (terms, card) in LICENCES.items()
        if any(preset.startswith(name) for preset in PRESETS)
    ]
    rows.append(("`*-tiny`", *none))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _module(name: str) -> str:
    return next(family.module_name for family in FAMILIES.values() if name in family.presets)


def _place(name: str) -> tuple[str, int]:
    return _module(name), PRESETS[name].num_parameters()


def _row(name: str) -> tuple[str, ...]:
    config = PRESETS[name]
    heads = f"{config.num_attention_heads} ({config.num_query_groups})"
    sizes = (config.num_layers, config.hidden_size, heads, config.ffn_hidden_size, config.vocab_size)
    return (f"`{name}`", _module(name), _parameters(name), *map(str, sizes), str(config.max_position_embeddings))


def _parameters(name: str) -> str:
    config = PRESETS[name]
    total = _short(config.num_parameters())
    return f"{total} ({_short(config.num_parameters(active=True))})" if config.num_experts else total


def _short(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


if __name__ == "__main__":
    PAGE.write_text(page())

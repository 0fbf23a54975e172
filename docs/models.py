"""Write docs/models.md from the presets: ``python docs/models.py``; a test holds that it is up to date."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.models.presets import PRESETS

PAGE = Path(__file__).parent / "models.md"
MODULES = {"gpt": "GPTModule", "llama": "LlamaModule", "mixtral": "MixtralModule"}
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
A preset of your own is one line in `lightning_megatron/models/presets.py`.
"""


def page() -> str:
    """docs/models.md as it must be."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, sorted(PRESETS, key=_place))]
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + FOOT


def _place(name: str) -> tuple[str, int]:
    return _module(name), PRESETS[name].num_parameters()


def _module(name: str) -> str:
    return next(module for prefix, module in MODULES.items() if name.startswith(prefix))


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

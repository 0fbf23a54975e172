"""Write the table of lines a family into add-a-family.md: ``python docs/families.py``."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_megatron.config.hugging_face.family import Family
from lightning_megatron.config.training_fields import is_of_training
from lightning_megatron.families import FAMILIES

HERE = Path(__file__).parent
PAGE = HERE / "add-a-family.md"
PACKAGE = HERE.parent / "lightning_megatron"
BEGIN, END = "<!-- made by `python docs/families.py` -->\n", "<!-- end of what is made -->\n"
COLUMNS = ("family", "its file", "its own modules", "fields that none before it has", "lines that name them")
FIRST = ("gpt2", "llama", "mixtral")
"""Families that shared code was written for."""
NEXT = ("bloom", "qwen2", "qwen3", "qwen3_moe", "bert", "mistral", "gemma2", "gemma3_text", "gpt_oss", "t5")
NEXT += ("deepseek_v2", "deepseek_v3", "glm4_moe")
"""Those that came after them, in this order; any others follow."""
SIZES = {"norm_epsilon", "moe_ffn_hidden_size", "moe_router_topk"}
"""Fields of theirs that their presets leave as they are."""


def table() -> str:
    """The table: families in the order in which they came, without the first ones."""
    rows = [COLUMNS, ("---", "---:", "---:", "---", "---:"), *_rows()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows() -> list[tuple[str, ...]]:
    known: set[str] = SIZES.union(*(_fields_of(FAMILIES[name]) for name in FIRST))
    found = []
    for name in dict.fromkeys((*NEXT, *FAMILIES)):
        if name in FIRST:
            continue
        family = FAMILIES[name]
        new = sorted(_fields_of(family) - known)
        known |= set(new)
        in_words = ", ".join(f"`{field}`" for field in new) or "-"
        folders = _lines_of_own(family)
        elsewhere = _lines_with(tuple(new))
        found.append((f"`{name}`", str(_lines(_file_of(name))), str(folders or "-"), in_words, str(elsewhere or "-")))
    return found


def _file_of(model_type: str) -> Path:
    """The file that has a family."""
    for path in sorted([*(PACKAGE / "families").rglob("[!_]*.py"), *(PACKAGE / "encoders").glob("*/family.py")]):
        module = import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        if getattr(module, "FAMILY", None) is FAMILIES[model_type]:
            return path
    raise ValueError(model_type)


def _fields_of(family: Family) -> set[str]:
    """Fields that some preset of the family has another value in than the default; of texts, the values in quotes."""
    found = set()
    for recipe in family.presets.values():
        config = recipe()
        values = {each.name: getattr(config, each.name) for each in fields(config)}
        names = (each.name for each in fields(config) if values[each.name] != _default(each))
        changed = {name: values[name] for name in names if not is_of_training(name, config)}
        found |= {f'"{value}"' if isinstance(value, str) else name for name, value in changed.items()}
    return found


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _lines_of_own(family: Family) -> int:
    """Lines beside the file of a family whose configurations are of a class of their own.

    They are those of its folder or, if the class is in the family's file, of the modules that its layers name.
    """
    defining = sys.modules[family.config_class.__module__].__file__
    is_shared = sum(each.config_class is family.config_class for each in FAMILIES.values()) > 1
    if is_shared or defining is None:
        return 0
    if Path(defining) == _file_of(family.model_type):
        layers = [layer for recipe in family.presets.values() for layer in recipe().layers]
        modules = {name.partition(":")[0] for layer in layers for name in (layer.mixer, layer.feed_forward)}
        return sum(_lines(PACKAGE.parent / f"{each.replace('.', '/')}.py") for each in modules)
    return sum(_lines(path) for path in Path(defining).parent.glob("*.py") if path.name != "family.py")


def _lines_with(names: tuple[str, ...]) -> int:
    """Lines of shared code in which one of some names stands."""
    pattern = re.compile(rf"(?<!\w)({'|'.join(names)})(?!\w)") if names else None
    count = 0
    for text in _sources() if pattern is not None else ():
        count += sum(pattern.search(line) is not None for line in text.splitlines())
    return count


@cache
def _sources() -> tuple[str, ...]:
    paths = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return tuple((PACKAGE / path).read_text() for path in paths if path.parts[0] not in ("families", "encoders"))


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def page() -> str:
    """docs/add-a-family.md as it must be."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())

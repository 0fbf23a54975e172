"""The order in which a model becomes ready to train is that of the table in docs/design.md."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_llama

from lightning_megatron import LlamaModule, LoRA, MegatronStrategy
from lightning_megatron.testing.trainer import quiet_trainer

DESIGN = Path(__file__).parents[3] / "docs" / "design.md"
STEPS = dict(re.findall(r"^\| (\w+) \| `([\w.]+:[\w.]+)` \|", DESIGN.read_text(), re.MULTILINE))


def test_a_model_is_set_up_by_the_steps_of_the_table_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def note(step: str, module: str, path: str) -> None:
        *owners, name = path.split(".")
        owner = import_module(f"lightning_megatron.{module}")
        owner = attrgetter(".".join(owners))(owner) if owners else owner
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.append(step)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    module = LlamaModule(tiny_llama(), lora=LoRA(rank=2))
    quiet_trainer(MegatronStrategy(), max_steps=0).fit(module, [])
    for step, function in STEPS.items():
        note(step, *function.split(":"))
    quiet_trainer(MegatronStrategy(compile="eager"), max_steps=0).fit(module, [])
    assert seen == list(STEPS)
    assert len(seen) == 9

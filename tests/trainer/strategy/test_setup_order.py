"""The order in which a model becomes ready to train: build, fp8, compile, cast, move, buffers (docs/design.md)."""

from __future__ import annotations

from typing import Any

from tiny import tiny_llama

from lightning_megatron import GPTModule, MegatronStrategy
from lightning_megatron.lightning.step.optimizers import OptimizerSet
from lightning_megatron.lightning.step.precision import MegatronPrecision
from lightning_megatron.models import gpt, stages
from lightning_megatron.testing.trainer import quiet_trainer


def test_a_model_is_built_then_fp8_compiled_cast_moved_and_put_on_buffers(monkeypatch):
    seen: list[str] = []
    module = GPTModule(tiny_llama())

    def note(step: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            seen.append(step)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note("build", gpt.GPTModel, "__init__")
    note("fp8", stages, "use_fp8")
    note("compile", GPTModule, "compile_blocks")
    note("cast", MegatronPrecision, "convert_module")
    note("move", MegatronStrategy, "model_to_device")
    note("buffers", OptimizerSet, "__init__")
    trainer = quiet_trainer(MegatronStrategy(compile="eager"), max_steps=0)
    trainer.fit(module, [])
    assert seen == ["build", "fp8", "compile", "cast", "move", "buffers"]

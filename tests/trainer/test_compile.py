"""Blocks through ``torch.compile``: the curves of the same layout without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader
from tracing import compiled

from lightning_megatron import ConfigError, GPTModule, MegatronStrategy
from lightning_megatron import device as devices
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

LAZY = devices.is_lazy(torch.device(devices.best_available().type))
not_lazy = pytest.mark.skipif(LAZY, reason="lazy mode compiles by itself, and refuses")

# The compiler's whole front half, whose graphs are run as they are: no C++ is made, which takes half a minute a run.
TRACED = "aot_eager"
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "llama", {}),
    "dropout": (1, "gpt", {"micro_batch_size": 2}),
    "tp": (2, "llama", {"tp": 2}),
    "pp": (2, "gpt", {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    "zero-bubble": (2, "llama", {"pp": 2, "pipeline_schedule": "zero-bubble", "micro_batch_size": 2}),
    "cp": (2, "llama", {"cp": 2}),
    "ep": (2, "mixtral", {"ep": 2}),
    "selective": (2, "llama", {"tp": 2, "recompute": "selective"}),
    "full": (1, "llama", {"recompute": "full"}),
    "parts": (1, "llama", {"recompute": ["mlp"]}),
}

WHOLE = ("one rank", "pp", "full")
"""Layouts in which a block is one graph."""
SLOW = ("tp", "zero-bubble", "cp", "ep", "selective", "parts")


def samples(number: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(61, (number, 13), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def train(family: str, options: dict[str, Any]) -> list[float]:
    seed_everything(5, verbose=False)
    layers = 4 if "vpp" in options else 2
    sizes = {"num_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
    dropout = {"hidden_dropout": 0.2} if family == "gpt" and options.get("pp", 1) == 1 else {}
    module = GPTModule(f"{family}-tiny", lr=1e-3, **sizes, **dropout)
    recorder = Recorder()
    trainer = quiet_trainer(MegatronStrategy(**options), max_epochs=1, gradient_clip_val=1.0, logger=recorder)
    trainer.fit(module, *(DataLoader(samples(n), batch_size=4) for n in (32, 8)))
    return [x for name in ("train_loss", "grad_norm", "val_loss") for x in recorder.series(name)]


def both(family: str, options: dict[str, Any], backend: bool | str) -> tuple[list[float], list[float], int, list[str]]:
    """Both curves, how many graphs were compiled, and what broke them."""
    return train(family, options), *compiled(train, family, {**options, "compile": backend})


@not_lazy
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW else pytest.mark.slow if name == "pp" else ())
        for name in LAYOUTS
    ],
)
def test_compiled_blocks_train_alike(ranks: Any, name: str) -> None:
    world, family, options = LAYOUTS[name]
    for plain, traced, graphs, breaks in ranks(world, both, family, options, TRACED):
        assert len(plain) >= 5
        assert graphs >= 2  # training and validation
        assert name not in WHOLE or not breaks
        assert traced == pytest.approx(plain, rel=1e-5)


@not_lazy
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tp", "ep"])
def test_the_devices_own_compiler_trains_alike(ranks: Any, name: str) -> None:
    world, family, options = LAYOUTS[name]
    for plain, traced, graphs, _ in ranks(world, both, family, options, True):
        assert graphs >= 2
        assert traced == pytest.approx(plain, rel=1e-5)


@not_lazy
def test_a_module_that_names_no_blocks_is_told() -> None:
    strategy = MegatronStrategy(compile=True)
    trainer = quiet_trainer(strategy, max_steps=1)
    with pytest.raises(ConfigError, match="compile_blocks"):
        trainer.fit(BoringModel())


@pytest.mark.skipif(not LAZY, reason="only lazy mode refuses")
def test_lazy_mode_refuses_and_says_why() -> None:
    trainer = quiet_trainer(MegatronStrategy(compile=True), max_steps=1)
    with pytest.raises(ConfigError, match="lazy mode compiles by itself; nearest valid: False"):
        trainer.fit(BoringModel())

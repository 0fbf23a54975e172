"""Blocks through ``torch.compile``: the curves of the same layout without it."""

from __future__ import annotations

import sys
from pathlib import Path
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
from tests.late import late_gathers

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
    "ALiBi": (1, "bloom", {}),
    "windows": (1, "mistral", {}),
    "soft caps": (1, "gemma2", {}),
    "sinks and biased experts": (1, "gpt-oss", {}),
}

WHOLE = ("one rank", "pp", "full")
"""Layouts in which a block is one graph."""
WINDOWED = ("mistral", "gemma2", "gpt-oss")
SLOW = (
    "ALiBi",
    "windows",
    "soft caps",
    "sinks and biased experts",
    "tp",
    "zero-bubble",
    "cp",
    "ep",
    "selective",
    "parts",
)


def samples(number: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(61, (number, 13), generator=torch.Generator().manual_seed(3))
    return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]


def train(family: str, options: dict[str, Any], precision: Any = "32-true", rows: int = 32) -> list[float]:
    seed_everything(5, verbose=False)
    layers = 4 if "vpp" in options else 2
    sizes = {"num_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
    if family in WINDOWED:
        sizes["sliding_window"] = 5  # of 12 tokens
    dropout = {"hidden_dropout": 0.2} if family == "gpt" and options.get("pp", 1) == 1 else {}
    module = GPTModule(f"{family}-tiny", lr=1e-3, **sizes, **dropout)
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(**options), precision=precision, max_epochs=1, gradient_clip_val=1.0, logger=recorder
    )
    trainer.fit(module, *(DataLoader(samples(n), batch_size=4) for n in (rows, 8)))
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


def parts() -> int:
    """Parts that are compiled: a block; on some devices embedding and head too, or the passes over logits."""
    device = torch.device(devices.best_available().type)
    return 1 + 2 * devices.compiles_ends(device) + devices.compiles_softmax(device)


@not_lazy
def test_the_arithmetic_of_a_processor_is_not_asked_for_inside_of_a_graph() -> None:
    _, graphs, breaks = compiled(train, "llama", {"compile": TRACED}, precision="bf16-mixed")
    assert not breaks
    assert graphs == 2 * parts(), "training and validation"


@not_lazy
@pytest.mark.slow
def test_the_rest_of_an_epoch_in_bf16_breaks_no_graph() -> None:
    options = {"micro_batch_size": 2}
    traced, graphs, breaks = compiled(train, "llama", {**options, "compile": TRACED}, precision="bf16-mixed", rows=35)
    assert not breaks, "fp32 gradients of bf16 parameters break no trace"
    assert graphs >= 2
    assert traced == pytest.approx(train("llama", options, precision="bf16-mixed", rows=35), rel=2e-2)


def late_and_compiled(options: dict[str, Any]) -> tuple[list[float], list[float], int]:
    with late_gathers():
        plain, traced, graphs, breaks = both("llama", {"micro_batch_size": 2, "bucket_size": 2000, **options}, TRACED)
    assert all("_wait" in each for each in breaks), "a block waits once, before its graph"
    return plain, traced, graphs


@not_lazy
@pytest.mark.gate
@pytest.mark.slow
def test_parameters_that_are_gathered_meanwhile_cut_no_graph(ranks: Any) -> None:
    for plain, traced, graphs in ranks(2, late_and_compiled, {}):
        assert graphs == 2 * parts(), "training and validation"
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


def test_cuda_needs_a_c_compiler_and_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Held against Triton, which looks for CC, then gcc, then clang, in the first step only."""
    card = torch.device("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    lacks = str(devices.compiler_lacks(card, "inductor"))
    assert lacks == ("a C compiler: there is no gcc and no clang; install it (Debian: gcc), or name another one in CC")
    monkeypatch.setenv("CC", "mycc")
    assert "there is no mycc;" in str(devices.compiler_lacks(card, "inductor"))
    for name in ("mycc", "clang"):
        (tmp_path / name).touch(mode=0o755)
    assert "Python.h" in str(devices.compiler_lacks(card, "inductor"))
    monkeypatch.delenv("CC")
    (tmp_path / "Python.h").touch()
    assert devices.compiler_lacks(card, "inductor") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton" in str(devices.compiler_lacks(card, "inductor"))


@not_lazy
@pytest.mark.skipif(devices.best_available().type != "cpu", reason="only code for a CPU is C++")
def test_a_machine_without_a_compiler_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    trainer = quiet_trainer(MegatronStrategy(compile=True), max_steps=1)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler: there is no no-such-compiler"):
        trainer.fit(GPTModule("gpt-tiny", num_layers=1))
    assert devices.compiler_lacks(torch.device("cpu"), "aot_eager") is None
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    assert "Python.h" in str(devices.compiler_lacks(torch.device("cpu"), "inductor"))

"""Intel's archived plugin, where it can still be imported (Lightning 2.5.5 and older): its accelerator as it is.

Its profiler asks for activities that only the real bridge adds to torch, so nothing of it is seen here: a Trainer takes
whatever profiler it is given, and the strategy has no part in it.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_megatron import MegatronHPUStrategy
from lightning_megatron import device as devices
from lightning_megatron.testing.trainer import PoolEnvironment, Recorder

pytestmark = pytest.mark.skipif(not devices.hpu_available(), reason="needs a Gaudi, or --hpu-sim")


STUBBED = (
    "habana_dataloader",
    "habana_frameworks.mediapipe",
    "habana_frameworks.torch.utils",
    "habana_frameworks.torch.hpex.experimental",
)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Names that lightning-habana imports from Gaudi's software and the simulation lacks; no test calls them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(STUBBED):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def anything(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


@pytest.fixture
def archived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    tool = tmp_path / "hl-smi"  # whose output it reads
    tool.write_text("#!/bin/sh\necho 'Habanalabs hl-smi/hlml version hl-1.21.0-fw-59.1.1.0 (May 04 2025 - 02:48:21)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Stubs()])
    try:
        import lightning_habana.pytorch as archived
    except ImportError as error:
        pytest.skip(f"lightning-habana cannot be imported here: {error}")
    return archived


def train(tmp_path: Path, **given: Any) -> tuple[Trainer, list[float]]:
    from test_accelerator import Samples, module

    recorder = Recorder()
    trainer = Trainer(
        strategy=MegatronHPUStrategy(micro_batch_size=2),
        devices=1,
        max_steps=3,
        logger=recorder,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        plugins=[PoolEnvironment()],
        **given,
    )
    trainer.fit(module(), DataLoader(Samples(), batch_size=4))
    return trainer, recorder.series("train_loss")


def test_its_accelerator_is_taken_as_it_is(archived: Any, tmp_path: Path) -> None:
    theirs = archived.accelerator.HPUAccelerator()
    trainer, losses = train(tmp_path, accelerator=theirs)
    assert trainer.accelerator is theirs
    assert trainer.strategy.root_device.type == torch.device(devices.HPU.type).type
    assert losses == train(tmp_path)[1]
    assert len(losses) == 3

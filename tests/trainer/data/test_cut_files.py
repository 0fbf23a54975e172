"""A file that is cut off under a run kills the worker that reads it: what ends the run names the file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronStrategy
from lightning_megatron.data import IndexedDatasetWriter
from lightning_megatron.testing.trainer import quiet_trainer

# What torch raises in the process that reads, wherever it is then.
KILLED = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of"


class Ending(LlamaModule):
    """Ends in its first step as by a worker's death."""

    cut: Path | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.cut is not None:
            os.truncate(self.cut, 100)
            time.sleep(0.05)  # longer than the pause between two looks
        raise RuntimeError(KILLED)


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("cut", ["one.bin", "two.idx", None])
def test_a_workers_death_names_the_file_that_was_cut_off(tmp_path: Path, cut: str | None, blended: bool) -> None:
    for name in ("one", "two"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(20):
                writer.add_document(np.arange(30), [30])
    paths = ["1", str(tmp_path / "one"), "1", str(tmp_path / "two")]
    if not blended:
        paths = [str(tmp_path / (cut or "one").partition(".")[0])]
    data = MegatronDataModule(paths, seq_length=8, batch_size=2, split="90,10,0")
    module = Ending("llama-tiny", num_layers=1, hidden_size=16, vocab_size=40)
    module.cut = None if cut is None else tmp_path / cut
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        quiet_trainer(MegatronStrategy(), max_steps=1).fit(module, datamodule=data)
    if cut is None:
        assert str(caught.value) == KILLED
    else:
        first, _, rest = str(caught.value).rpartition("\n")
        assert f"{tmp_path / cut}: cut off while it was in use: 100 bytes" in first
        assert rest == KILLED

"""A rank that raises or dies in the middle of a step ends the job: soon, with an error, and with its name.

Real processes, started by Lightning's launcher: this file is also the script that they run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.machine.job_environment import own_environment

TIMEOUT = 90
"""Seconds after which a collective that nobody answers fails."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no luck in backward")


def job(how: str, stage: int) -> None:
    """Train two stages on two processes; in the second batch something happens on one of them."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from lightning_megatron import GPTModule, MegatronStrategy

    class Fails(GPTModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1 and self.mesh.pp.rank == stage:
                if how == "forward":
                    raise ArithmeticError("no luck in forward")
                if how == "death":
                    os._exit(7)
                block = next(iter(self._built().layers.values()))
                block.register_forward_hook(lambda module, args, out: (FailingBackward.apply(out[0]), *out[1:]))
            return super().training_step(batch, batch_idx)

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(pp=2, micro_batch_size=1, timeout=timedelta(seconds=TIMEOUT)),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.zeros(16, 9, dtype=torch.long)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "ffn_hidden_size": 32}
    loader: Any = DataLoader([{"tokens": t[:-1], "labels": t[1:]} for t in tokens], batch_size=4)
    trainer.fit(Fails("gpt-tiny", **sizes), loader)


def outcome(how: str, stage: int) -> tuple[int, float, str]:
    """Exit code, seconds and output of the job."""
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, __file__, how, str(stage)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        env=own_environment(OMP_NUM_THREADS="1"),
        cwd=Path(__file__).parent,
    )
    return ended.returncode, time.monotonic() - begin, ended.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("how", ["forward", "backward", "death"])
def test_a_failing_stage_ends_the_job_and_is_named(how: str, stage: int) -> None:
    code, seconds, output = outcome(how, stage)
    assert code != 0, output
    assert seconds < 300, output
    if how == "death":
        # The dead cannot speak: who waited for it says so.
        assert re.search(rf"waited for .* pipeline rank {stage} \(rank {stage} of the job\)", output), output
    else:
        assert f"ArithmeticError: no luck in {how}" in output
        assert re.search(rf"on pipeline rank {stage} of 2, at {stage}[FB]\d", output), output


if __name__ == "__main__":
    job(sys.argv[1], int(sys.argv[2]))

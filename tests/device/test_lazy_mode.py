"""Lazy mode trains as eager mode does, in processes of their own, since a process is in one mode for good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_megatron.machine.job_environment import own_environment

SCRIPT = """
import json, sys
import simulated_gaudi as hpu
hpu.enable("1.24")
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_megatron import LlamaModule, MegatronHPUStrategy

class Losses(LlamaModule):
    found = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.found.append(float(loss))
        return loss

seed_everything(5, verbose=False)
sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
module = Losses("llama-tiny", lr=1e-2, **sizes)
ids = torch.randint(61, (20, 17), generator=torch.Generator().manual_seed(3))
samples = [{"tokens": row[:-1], "labels": row[1:]} for row in ids]
trainer = Trainer(
    strategy=MegatronHPUStrategy(), accelerator="hpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
print("LOSSES " + json.dumps(module.found))
"""


MOVED = """
import json
import simulated_gaudi as hpu
hpu.enable("1.24")
import torch
module = torch.nn.Linear(2, 1, bias=False)
module.weight.mark = True
module = module.to("hpu")
memory, flat = module.weight.data_ptr(), torch.full((1, 2), 7.0, device="hpu")
module.weight.data = flat
print(json.dumps([module.weight.data_ptr() == memory, hasattr(module.weight, "mark"), module.weight[0].tolist()]))
"""


def run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**own_environment(), **variables}
    for name in ("PT_HPU_WEIGHT_SHARING", "PT_HPU_LAZY_MODE"):
        if name not in variables:
            environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("LOSSES "))
    found: list[float] = json.loads(line.removeprefix("LOSSES "))
    return found


@pytest.mark.slow
def test_five_lazy_steps_are_five_eager_steps(tmp_path: Path) -> None:
    eager, lazy = (run(tmp_path, PT_HPU_LAZY_MODE=mode) for mode in ("0", "1"))
    assert eager.returncode == lazy.returncode == 0, lazy.stderr[-3000:]
    assert len(losses(eager)) == 5
    assert losses(eager)[-1] < losses(eager)[0]
    assert losses(lazy) == losses(eager)


@pytest.mark.slow
def test_weight_sharing_in_lazy_mode_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, PT_HPU_LAZY_MODE="1", PT_HPU_WEIGHT_SHARING="1")
    assert done.returncode != 0
    assert "PT_HPU_WEIGHT_SHARING='1': in lazy mode Gaudi's software then replaces parameters" in done.stderr


@pytest.mark.parametrize("shares", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_parameters_that_moved_keep_their_memory_under_weight_sharing(shares: str, tmp_path: Path) -> None:
    """This is the reason for the refusal: flat buffers, which the optimizer updates, would not be what layers read."""
    done = subprocess.run(
        [sys.executable, "-c", MOVED],
        cwd=tmp_path,
        env=own_environment(PT_HPU_LAZY_MODE="1", PT_HPU_WEIGHT_SHARING=shares),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kept, marked, values = json.loads(done.stdout.splitlines()[-1])
    assert kept is (shares == "1")
    assert marked is (shares == "0"), "an attribute of the parameter"
    assert values == [7.0, 7.0]

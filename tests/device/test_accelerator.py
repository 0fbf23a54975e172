"""Lightning on a Gaudi: choice of the accelerator, its statistics, assignment of cards to ranks, marked steps.

Run with ``make test-hpu``: this session must have the simulation (``--hpu-sim``).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulated_gaudi as hpu
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import (
    ConfigError,
    GPTModule,
    HPUAccelerator,
    LlamaModule,
    MegatronDataModule,
    MegatronHPUStrategy,
    MegatronPrecision,
    MegatronStrategy,
)
from lightning_megatron import device as devices
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing.trainer import Recorder, quiet_trainer

pytestmark = pytest.mark.skipif(not devices.hpu_available(), reason="needs a Gaudi, or --hpu-sim")
HPU = devices.HPU.type
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Importable by name: workers are spawned."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(61, (13,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def module(**options: Any) -> GPTModule:
    seed_everything(5, verbose=False)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "vocab_multiple": 4}
    return GPTModule("llama-tiny", lr=1e-3, **sizes, **options)


# Choice of the accelerator


@pytest.mark.parametrize(
    "given",
    [{}, {"accelerator": HPU}, {"accelerator": HPUAccelerator()}, {"accelerator": HPU, "strategy": "megatron_hpu"}],
    ids=["auto", "by name", "by object", "both by name"],
)
def test_a_trainer_takes_the_gaudi(given: dict[str, Any]) -> None:
    trainer = Trainer(**{"strategy": MegatronHPUStrategy(), "devices": 1, **QUIET, **given})
    assert isinstance(trainer.accelerator, HPUAccelerator)
    assert trainer.strategy.root_device == torch.device(HPU, 0)


def test_all_cards_where_nobody_says_how_many() -> None:
    assert Trainer(strategy=MegatronHPUStrategy(), **QUIET).num_devices == HPUAccelerator.auto_device_count() == 8


def test_the_cards_that_the_job_may_take_where_nobody_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VISIBLE, "4,5,6,7")
    assert Trainer(strategy=MegatronHPUStrategy(), **QUIET).num_devices == 4
    with pytest.raises(ConfigError, match=r"devices=8: HABANA_VISIBLE_MODULES=4,5,6,7 permits 4"):
        Trainer(strategy=MegatronHPUStrategy(), devices=8, **QUIET)
    monkeypatch.setenv(devices.VISIBLE, "all")
    with pytest.raises(ConfigError, match="no word such as 'all'"):
        Trainer(strategy=MegatronHPUStrategy(), **QUIET)


def test_a_cpu_on_request() -> None:
    trainer = Trainer(strategy=MegatronHPUStrategy(), accelerator="cpu", devices=1, **QUIET)
    assert isinstance(trainer.accelerator, CPUAccelerator)
    on_cpus = MegatronHPUStrategy(parallel_devices=[torch.device("cpu")])
    assert isinstance(Trainer(strategy=on_cpus, **QUIET).accelerator, CPUAccelerator)


def test_a_strategy_by_name_cannot_be_asked_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"accelerator='auto'.*nearest valid: hpu, cpu"):
        Trainer(strategy="megatron", devices=1, **QUIET)


@pytest.mark.parametrize("asked", [[0, 3], 0, "many"])
def test_cards_are_counted_not_named(asked: Any) -> None:
    with pytest.raises(ConfigError, match="devices="):
        HPUAccelerator.parse_devices(asked)


# What it says


def test_bf16_mixed_is_our_precision_and_no_autocast_of_cuda() -> None:
    trainer = Trainer(strategy=MegatronHPUStrategy(), devices=1, precision="bf16-mixed", **QUIET)
    assert isinstance(trainer.precision_plugin, MegatronPrecision)
    assert trainer.precision_plugin.mode.params == torch.bfloat16
    assert trainer.precision_plugin.mode.main == torch.float32


def test_memory_under_the_names_of_gaudi(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = quiet_trainer(
        MegatronStrategy(), max_steps=2, logger=recorder, callbacks=[DeviceStatsMonitor()], default_root_dir=tmp_path
    )
    trainer.fit(module(), DataLoader(Samples(), batch_size=4))
    named = {name.rsplit("/", 1)[-1].rsplit(".", 1)[-1] for row in recorder.rows for name in row}
    assert {"Limit", "InUse", "MaxInUse", "NumAllocs", "TotalActiveAllocs"} <= named
    assert any(value > 0 for row in recorder.rows for name, value in row.items() if name.endswith("MaxInUse"))


class StartMethods(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.seen.append(trainer.train_dataloader.multiprocessing_context.get_start_method())


def test_workers_are_spawned() -> None:
    callback = StartMethods()
    trainer = quiet_trainer(MegatronStrategy(), max_steps=2, callbacks=[callback])
    trainer.fit(module(), DataLoader(Samples(), batch_size=4, num_workers=1))
    assert callback.seen == ["spawn"]
    assert trainer.global_step == 2


# Cards, and steps

JOB = """
import os, sys, torch
import lightning.pytorch as L
from lightning_megatron import MegatronHPUStrategy
from test_accelerator import Samples, module
from torch.utils.data import DataLoader
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for again in range(2):
    trainer = L.Trainer(strategy=MegatronHPUStrategy(tp=2), devices=2, max_steps=1, **quiet)
    trainer.fit(module(), DataLoader(Samples(), batch_size=4))
card, port = os.environ["HLS_MODULE_ID"], os.environ["MASTER_PORT"]
print(f"rank {trainer.global_rank} card {card} of {trainer.strategy.root_device}", flush=True)
print("port", port, flush=True)
"""


def run(code: str, tmp_path: Path, **environment: str) -> str:
    script = tmp_path / "job.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + code)
    words = [sys.executable, str(script)]
    env = own_environment(**environment)
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_every_rank_takes_its_own_card(tmp_path: Path) -> None:
    said = run(JOB, tmp_path, HLS_MODULE_ID="5")  # a card left over in the parent
    assert f"rank 0 card 0 of {HPU}:0" in said
    assert f"rank 1 card 1 of {HPU}:0" in said
    assert "port 12345" not in said, "which the bridge sets for all jobs of a node"


def test_ranks_of_slurm_meet_where_slurm_says(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    once = JOB.replace("range(2)", "range(1)")
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + once)
    slurm = {
        "JOB_ID": "4711",
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "NNODES": "1",
        "NODEID": "0",
        "NODELIST": "localhost",
        "JOB_NAME": "job",
    }
    jobs = []
    for rank in ("0", "1"):
        own = {f"SLURM_{name}": value for name, value in (slurm | {"PROCID": rank, "LOCALID": rank}).items()}
        env = own_environment(**own)
        jobs.append(
            subprocess.Popen([sys.executable, script], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        )
    for job in jobs:
        said, _ = job.communicate(timeout=300)
        assert job.returncode == 0
        assert f"port {15000 + 4711}" in said


def marks() -> list[int]:
    """Marks of runs of one step, of three, and of one with four micro-batches."""
    found = []
    for size, steps in ((4, 1), (4, 3), (1, 1)):
        trainer = quiet_trainer(MegatronHPUStrategy(micro_batch_size=size), max_steps=steps)
        hpu.reset_calls()
        trainer.fit(module(), DataLoader(Samples(), batch_size=4))
        found.append(hpu.calls()["mark_step"])
    return found


LAZY = "from test_accelerator import marks\nprint(marks())"


def test_lazy_mode_gets_its_marks(tmp_path: Path) -> None:
    """One after each forward and each backward of a micro-batch, one after the step; none in eager mode."""
    expected, is_lazy = {True: [3, 9, 9], False: [0, 0, 0]}, devices.is_lazy(torch.device(HPU))
    assert marks() == expected[is_lazy]
    other = run(LAZY, tmp_path, PT_HPU_LAZY_MODE=str(int(not is_lazy)))
    assert other.splitlines()[-1] == str(expected[not is_lazy])


MIGRATION = """
import torch
from lightning_megatron import MegatronHPUStrategy
from lightning_megatron import device as devices
from lightning_megatron.testing.trainer import quiet_trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

class Worded(BoringModel):
    def configure_model(self):
        assert torch.cuda.is_available()
        self.layer = torch.nn.Linear(32, 2, device="cuda")
        self.table = torch.arange(2.0).cuda()
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) + self.table.to("cuda") + torch.ones(2, device="cuda")).square().mean()

trainer = quiet_trainer(MegatronHPUStrategy(gpu_migration=True), max_steps=2)
trainer.fit(Worded(), DataLoader(torch.randn(8, 32), batch_size=4))
print(trainer.global_step, devices.best_available().type, trainer.model.layer.weight.device)
"""


def test_a_module_that_says_cuda_runs_on_the_gaudi(tmp_path: Path) -> None:
    assert run(MIGRATION, tmp_path).splitlines()[-1] == f"2 {HPU} {HPU}:0"


class Packed(MegatronDataModule):
    """As ``ChatDataModule`` and ``reset_attention_mask`` make it."""

    packs_documents = True  # type: ignore[assignment]


def test_packed_data_is_refused_before_training(tmp_path: Path) -> None:
    data = Packed(str(tmp_path / "absent"), 8)
    with pytest.raises(ConfigError, match="data='Packed': FusedSDPA takes no document bounds"):
        quiet_trainer(MegatronHPUStrategy(), accelerator="hpu").fit(LlamaModule("llama-tiny", num_layers=1), data)

"""VerifyCheckpoint and KillSwitch in a Trainer: what they stop, what they leave, what a resumed run goes on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, GPTModule, KillSwitch, MegatronStrategy, VerifyCheckpoint
from lightning_megatron.checkpoint import CheckpointError, saving, verify
from lightning_megatron.checkpoint.select.verify import written_faults
from lightning_megatron.data import MegatronSampler, ResumableDataLoader
from lightning_megatron.machine.job_environment import own_environment
from lightning_megatron.testing.trainer import Recorder, quiet_trainer
from lightning_megatron.tools.cli.main import main

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32, "vocab_multiple": 2}
SIZES |= {"num_query_groups": 2, "ffn_hidden_size": 24, "head_dim": 8}
STEPS = 6


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(32, (STEPS * 4, 9), generator=torch.Generator().manual_seed(2))
    return [{"tokens": t[:-1], "labels": t[1:]} for t in tokens]


def loader() -> ResumableDataLoader:
    """All ranks read the same, and a run resumes at its batch."""
    rows = texts()
    return ResumableDataLoader(rows, batch_sampler=MegatronSampler(len(rows), batch_size=4))  # type: ignore[arg-type]


def train(
    folder: Path, layout: dict[str, int], *callbacks: Callback, ckpt_path: str | None = None, **options: Any
) -> list[float]:
    """Losses of the steps that this call runs; one checkpoint every second step, and ``last.ckpt``."""
    seed_everything(7, verbose=False)
    recorder = Recorder()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = quiet_trainer(
        MegatronStrategy(**layout),
        max_epochs=1,
        logger=recorder,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        callbacks=[*callbacks, saver],
        **options,
    )
    module = GPTModule("llama-tiny", lr=1e-2, **SIZES)
    try:
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
    finally:
        train.losses = recorder.series("train_loss")  # type: ignore[attr-defined]
    return recorder.series("train_loss")


class At(Callback):
    """Does something on every rank, or on one, before a step."""

    def __init__(self, step: int, act: Any, rank: int | None = None) -> None:
        self.step, self.act, self.rank = step, act, rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.rank in (None, trainer.global_rank):
            self.act(trainer, module)


class After(At):
    """The same after a step, before its checkpoint."""

    def on_train_batch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)


# VerifyCheckpoint


def nudge_a_norm(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        next(p for name, p in module.named_parameters() if "norm" in name).view(-1)[3] += 1e-6


def nudge_a_moment(trainer: Any, module: Any) -> None:
    (optimizer,) = trainer.strategy.sharded_optimizers
    shard = next(s for s in optimizer.param_shards() if "norm" in s.name)
    shard.state["exp_avg"].view(-1)[0] += 1.0


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def guarded(folder: Path, layout: dict[str, int], act: Any) -> str | None:
    rank = dist.get_world_size() - 1
    try:
        train(folder, layout, VerifyCheckpoint(), *([After(4, act, rank)] if act else []))
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_good_checkpoints_pass_and_are_as_without_the_callback(ranks, tmp_path):
    for layout in ({"tp": 2}, {"pp": 2}, {}):
        folder = tmp_path / str(layout)
        assert ranks(2, guarded, folder, layout, None) == [None, None]
        assert names_in(folder) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


@pytest.mark.parametrize(("layout", "act", "key"), [
    ({"tp": 2}, nudge_a_norm, "model.model.layers.0."),
    ({"tp": 2}, nudge_a_moment, ".exp_avg"),
    ({}, nudge_a_norm, "model."),
])  # fmt: skip
def test_a_replica_that_differs_stops_the_save_and_last_stays(ranks, tmp_path, layout, act, key):
    for error in ranks(2, guarded, tmp_path, layout, act):
        assert "ranks do not hold the same" in error
        assert "ranks 1 hold other values than rank 0" in error
        assert key in error
        assert "norm" in error
    assert names_in(tmp_path) == ["last.ckpt", "step=2.ckpt"]
    assert verify(tmp_path / "last.ckpt") == []


def faulty_disk(folder: Path) -> str:
    """Error of a run whose disk gives back another byte than it was given, in the second checkpoint."""

    def flipped(directory: Path, mesh: Any) -> Any:
        if directory.name.startswith("step=4") and mesh.rank == 0:
            file = directory / "__0_0.distcp"
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        return written_faults(directory, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "written_faults", flipped)
        with pytest.raises(CheckpointError) as error:
            train(folder, {"tp": 2}, VerifyCheckpoint())
    return str(error.value)


def test_a_faulty_disk_is_found_before_the_checkpoint_has_its_name(ranks, tmp_path):
    for error in ranks(2, faulty_disk, tmp_path):
        assert "__0_0.distcp: altered" in error
    assert names_in(tmp_path) == ["last.ckpt", "step=2.ckpt"]


def test_another_strategy_is_refused(tmp_path):
    trainer = quiet_trainer("auto", callbacks=[VerifyCheckpoint()], max_steps=1)
    with pytest.raises(ConfigError, match="MegatronStrategy"):
        trainer.fit(GPTModule("llama-tiny", **SIZES), DataLoader(texts(), batch_size=4))


# ckpt_path="last"


def resumed(folder: Path, *callbacks: Callback) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train(folder, {"tp": 2}, *callbacks, ckpt_path="last")
    return losses, [str(w.message) for w in caught if "newest good" in str(w.message)]


def damage(path: Path, how: str) -> None:
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "edited manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"tp": 2', '"tp": 1'))
    elif how == "truncated":
        os.truncate(path / "__1_0.distcp", 100)
    else:
        content = bytearray((path / "__1_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (path / "__1_0.distcp").write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "no manifest",
        "flipped byte",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("edited manifest", "truncated")),
    ],
)
def test_last_falls_back_to_the_newest_good_checkpoint_and_says_so_once(ranks, tmp_path, how):
    whole = ranks(2, train, tmp_path, {"tp": 2})[0]
    for name in ("last.ckpt", "step=6.ckpt"):
        damage(tmp_path / name, how)
    (losses, told), (_, others) = ranks(2, resumed, tmp_path)
    assert losses == whole[4:]
    (warning,) = told
    assert others == []
    assert f"newest good checkpoint, {tmp_path / 'step=4.ckpt'};" in warning
    for name in ("last.ckpt", "step=6.ckpt"):
        assert f"{tmp_path / name}: " in warning


# KillSwitch


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def stopped(folder: Path, layout: dict[str, int], act: Any, rank: int | None, step: int = 2, **options: Any) -> Any:
    switch = KillSwitch(folder / "stop", check_every=0.0)
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(SystemExit) as leave:
        train(folder / "run", layout, *([At(step, act, rank)] if act else []), switch, **options)
    after = [signal.getsignal(number) for number in SIGNALS]
    return leave.value.code, train.losses, switch.reason, after == before  # type: ignore[attr-defined]


def touch(trainer: Any, module: Any) -> None:
    (Path(trainer.checkpoint_callback.dirpath).parent / "stop").touch()


def sigterm(trainer: Any, module: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sigusr1(trainer: Any, module: Any) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def sigint(trainer: Any, module: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("act", "rank", "reason", "status"),
    [
        (touch, 0, "appeared", 0),
        (sigterm, 1, "SIGTERM", 143),
        pytest.param(sigusr1, 0, "SIGUSR1", 138, marks=pytest.mark.slow),
        pytest.param(sigint, None, "SIGINT", 130, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_told_to_stop_saves_and_resumes_where_it_stopped(ranks, tmp_path, act, rank, reason, status):
    layout = {"tp": 2}
    whole = ranks(2, train, tmp_path / "whole", layout)[0]
    results = ranks(2, stopped, tmp_path, layout, act, rank)
    for code, losses, why, given_back in results:
        assert code == status
        assert losses == whole[:4], "the step ends, and the next one, in which all ranks learn it"
        assert reason in why
        assert given_back
    assert verify(tmp_path / "run" / "last.ckpt") == []
    (tmp_path / "stop").unlink(missing_ok=True)
    assert ranks(2, train, tmp_path / "run", layout, ckpt_path="last")[0] == whole[4:]


def test_a_step_that_accumulates_is_finished_first(ranks, tmp_path):
    # Told in the first of six batches: the fourth completes the second of three steps.
    for code, losses, _, _ in ranks(2, stopped, tmp_path, {"tp": 2}, touch, 0, 0, accumulate_grad_batches=2):
        assert code == 0
        assert len(losses) == 2
    meta = torch.load(tmp_path / "run" / "last.ckpt" / "meta.pt", weights_only=True)
    assert meta["global_step"] == 2


def test_a_file_that_is_there_ends_the_run_before_anything_is_built(ranks, tmp_path):
    (tmp_path / "stop").touch()
    for code, losses, why, _ in ranks(2, stopped, tmp_path, {}, None, None):
        assert (code, losses) == (0, [])
        assert "is there" in why
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "stop").exists()


SCRIPT = """
import sys, time
from pathlib import Path
import lightning as L
sys.path.insert(0, {tests!r})
from test_checkpoint_callbacks import DataLoader, GPTModule, MegatronStrategy, SIZES, texts

class Slow(L.Callback):
    def on_train_batch_end(self, trainer, module, *args):
        if trainer.is_global_zero:
            Path("steps").write_text(str(trainer.global_step))
        time.sleep(0.05)

trainer = L.Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2), max_epochs=1000, logger=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[Slow()])
trainer.fit(GPTModule("llama-tiny", **SIZES), DataLoader(texts(), batch_size=4, num_workers=1))
print("never printed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to", "status"),
    [(signal.SIGTERM, "the first process", 143), (signal.SIGINT, "all", 130), (signal.SIGTERM, "all", 143)],
)
def test_a_signal_ends_a_script_of_two_processes_and_their_workers_with_a_checkpoint(tmp_path, number, to, status):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    words, pipe = [sys.executable, str(script)], subprocess.PIPE
    started = {"cwd": tmp_path, "env": own_environment(), "stdout": pipe, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **started) as process:
        try:
            steps = tmp_path / "steps"
            begun = time.monotonic()
            while not steps.exists() or int(steps.read_text() or 0) < 3:
                assert process.poll() is None
                assert time.monotonic() - begun < 300
                time.sleep(0.1)
            if to == "all":
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()  # nothing, where it has ended
    assert process.returncode == status
    assert "never printed" not in output
    (saved,) = tmp_path.rglob("last.ckpt")
    assert verify(saved) == []


# the command


def test_the_command_tells_file_and_tensor(ranks, tmp_path, capsys):
    ranks(2, train, tmp_path, {"tp": 2})
    path = str(tmp_path / "last.ckpt")
    assert main(["verify", path]) == 0
    assert capsys.readouterr().out == f"{path}: good\n"
    damage(Path(path), "flipped byte")
    assert main(["verify", path]) == 1
    told = capsys.readouterr().out
    assert "__1_0.distcp: altered" in told
    assert "optimizer_0.state." in told or "model." in told
    assert main(["verify", path, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["good"] is False
    (fault,) = result["faults"]
    assert fault["file"] == "__1_0.distcp"
    assert fault["tensors"]  # one, or all if the byte lies between two
    assert main(["verify"]) == 2
    assert main(["verify", str(tmp_path / "none.ckpt")]) == 2

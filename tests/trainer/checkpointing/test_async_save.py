"""Saves in the background: what they hold, what waits for them, what a failure leaves. The disk is held by hand."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from patience import PATIENCE
from test_checkpoint_callbacks import SIZES, After, At, loader, nudge_a_norm

from lightning_megatron import GPTModule, KillSwitch, MegatronStrategy, VerifyCheckpoint
from lightning_megatron.checkpoint import CheckpointError, verify
from lightning_megatron.checkpoint.background import host_copy
from lightning_megatron.checkpoint.background.host_copy import StateCopy
from lightning_megatron.checkpoint.dcp import fragments as transfer
from lightning_megatron.checkpoint.dcp.box_writer import BoxWriter
from lightning_megatron.checkpoint.directory.atomic_dir import Unfinished
from lightning_megatron.checkpoint.integrity.manifest import read_manifest
from lightning_megatron.checkpoint.tensors.keys import Key
from lightning_megatron.device import CPU
from lightning_megatron.testing.trainer import Recorder, kind_in_tests, quiet_trainer

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TP2: dict[str, Any] = {"tp": 2}
DP2: dict[str, Any] = {}


class Disk(BoxWriter):
    """Takes nothing of a checkpoint while ``NAME.hold`` lies beside it; is full on rank 1 where ``NAME.full`` does."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        directory = Path(self.path)
        folder, name = directory.parent.parent, Unfinished.parse(directory).path.name
        begun = time.monotonic()
        while (folder / f"{name}.hold").exists():
            assert time.monotonic() - begun < PATIENCE
            time.sleep(0.005)
        if (folder / f"{name}.full").exists() and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


class Watch(Callback):
    """Notes before each step what checkpoints there are, and lets the disk go before one of the steps."""

    def __init__(self, folder: Path, let_go: int = -1) -> None:
        self.folder, self.let_go = folder, let_go
        self.seen: dict[int, dict[str, str | None]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = contents(self.folder)
        dist.barrier()  # all have looked
        if trainer.is_global_zero and trainer.global_step == self.let_go:
            for hold in self.folder.glob("*.hold"):
                hold.unlink()


def contents(folder: Path) -> dict[str, str | None]:
    """Checkpoints, and where links lead."""
    return {path.name: os.readlink(path) if path.is_symlink() else None for path in folder.glob("*.ckpt")}


def train(folder: Path, strategy: dict[str, Any], *callbacks: Callback, saver: Any = None, **options: Any) -> Any:
    """Six steps, dropout on; by default with checkpoints after the second, fourth and sixth, which all stay."""
    seed_everything(7, verbose=False)
    wish = {"every_n_train_steps": 2, "save_top_k": -1} | (saver or {})
    recorder = Recorder()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(
        MegatronStrategy(**{"async_save": True} | strategy),
        logger=recorder,
        enable_checkpointing=True,
        use_distributed_sampler=False,
        callbacks=[*callbacks, ModelCheckpoint(folder, filename="{step}", **wish)],
        **{"max_epochs": 1} | options,
    )
    train.trainer = trainer  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BoxWriter", Disk)
        trainer.fit(GPTModule("llama-tiny", lr=1e-2, **SIZES, **DROPOUT), loader(), ckpt_path=ckpt_path)
    return recorder.series("train_loss")


def put(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()


# what is written


def watched(folder: Path, strategy: dict[str, Any], let_go: int, **options: Any) -> Any:
    watch = Watch(folder, let_go)
    losses = train(folder, strategy, watch, **options)
    return losses, watch.seen


def hashes(checkpoint: Path) -> dict[str, Any]:
    """All but ``.metadata``, in which each save has a random number."""
    return {name: entry for name, entry in read_manifest(checkpoint).files.items() if name != ".metadata"}


@pytest.mark.parametrize("layout", [TP2, DP2, {"pp": 2, "micro_batch_size": 2}], ids=["tp2", "dp2", "pp2"])
def test_steps_go_on_while_the_disk_is_held_and_do_not_reach_what_is_saved(ranks, tmp_path, layout):
    folder = tmp_path / "run"
    every = {"every_n_train_steps": 3}
    expected, _ = ranks(2, watched, folder, {**layout, "async_save": False}, -1, saver=every)[0]
    known = {path.name: hashes(path) for path in folder.iterdir()}
    assert known.keys() == {"step=3.ckpt", "step=6.ckpt"}
    shutil.rmtree(folder)
    put(folder, "step=3.ckpt.hold")
    for losses, seen in ranks(2, watched, folder, layout, 5, saver=every):
        assert seen[3] == seen[4] == seen[5] == {}, "what is not complete has no name"
        assert losses == expected
    assert {path.name: hashes(path) for path in folder.iterdir()} == known, "byte for byte what is written at once"
    assert all(verify(path) == [] for path in folder.iterdir())


class LateCopy(StateCopy):
    """Copies optimizer state only when somebody waits for it, and then takes its time."""

    asked_at: list[list[str]] = []  # noqa: RUF012

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked = threading.Event()

    def finish(self) -> Any:
        if self._late:
            assert self.asked.wait(PATIENCE), "the step did not wait"
            time.sleep(0.1)
        return super().finish()

    def wait(self) -> None:
        if not self.asked.is_set() and self._late:
            LateCopy.asked_at.append(sorted({Key.parse(key).state for key in self._late}))
        self.asked.set()
        super().wait()


class Passed(Callback):
    """Notes how far each step has come."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, int, int]] = []

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        self.noted.append(("backward is done", trainer.global_step, len(LateCopy.asked_at)))


def late(folder: Path, strategy: dict[str, Any], **options: Any) -> Any:
    LateCopy.asked_at = []
    passed = Passed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "StateCopy", LateCopy)
        losses = train(folder, strategy, passed, max_steps=5, saver={"every_n_train_steps": 3}, **options)
    return losses, passed.noted, LateCopy.asked_at


ON_CPU = kind_in_tests() is CPU
MOMENTS = ["exp_avg", "exp_avg_sq", "step"]
LATE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "tp2": (TP2, {}, MOMENTS),
    "dp2 bf16": (DP2, {"precision": "bf16-mixed"}, [*MOMENTS[:2], "master", "step"]),
    "pp2 bf16": ({"pp": 2, "micro_batch_size": 2}, {"precision": "bf16-mixed"}, [*MOMENTS[:2], "master", "step"]),
    "dp2 whole": ({"distributed_optimizer": False}, {"max_epochs": 2, "accumulate_grad_batches": 2}, MOMENTS),
}


@pytest.mark.parametrize("case", LATE)
def test_the_next_step_waits_for_the_copy_of_optimizer_state_and_the_files_are_those_of_a_save_at_once(
    ranks, tmp_path, case
):
    """The copy begins when the step after the save has done its backward, and takes longer than a step.

    What is in the memory of an accelerator is copied at once; only the number of steps is in the host's.
    """
    strategy, options, states = LATE[case]
    expected, *_ = ranks(2, late, tmp_path, {**strategy, "async_save": False}, **options)[0]
    known = hashes(tmp_path / "step=3.ckpt")
    shutil.rmtree(tmp_path / "step=3.ckpt")
    for losses, noted, asked in ranks(2, late, tmp_path, strategy, **options):
        assert losses == expected
        assert asked == [states if ON_CPU else ["step"]]
        assert ("backward is done", 3, 0) in noted, "nobody has waited before"
        assert ("backward is done", 4, 1) in noted
    assert hashes(tmp_path / "step=3.ckpt") == known
    assert verify(tmp_path / "step=3.ckpt") == []


def edit_moments(trainer: Any, module: Any, *, waits: bool) -> None:
    if waits:
        trainer.strategy.finish_copy()
    (optimizer,) = trainer.optimizers
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


class Edits(Callback):
    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            edit_moments(trainer, None, waits=self.waits)


def edited(folder: Path, waits: bool, strategy: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "StateCopy", LateCopy)
        train(folder, strategy, Edits(waits), max_steps=5, saver={"every_n_train_steps": 3})


def test_moments_that_a_callback_writes_right_after_a_save_are_never_saved(ranks, tmp_path):
    ranks(2, edited, tmp_path / "at once", False, {"async_save": False})
    ranks(2, edited, tmp_path / "waits", True, {})
    known, found = (hashes(tmp_path / how / "step=3.ckpt") for how in ("at once", "waits"))
    assert known.pop("meta.pt") != found.pop("meta.pt"), "it names the folder"
    assert found == known
    if not ON_CPU:  # it was copied at once
        ranks(2, edited, tmp_path / "unasked", False, {})
        assert hashes(tmp_path / "unasked" / "step=3.ckpt") | {"meta.pt": None} == known | {"meta.pt": None}
        return
    for text in ranks(2, edits_unasked, tmp_path / "not"):
        assert "exp_avg" in text
        assert "was written after the save and before the next optimizer step" in text
    assert not (tmp_path / "not").exists() or list((tmp_path / "not").iterdir()) == []


def edits_unasked(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        edited(folder, False, {})
    return str(error.value)


def test_the_checkpoint_before_and_the_link_to_it_stay_until_the_newer_one_is_durable(ranks, tmp_path):
    put(tmp_path, "step=4.ckpt.hold")
    for _, seen in ranks(2, watched, tmp_path, TP2, 5, saver={"save_top_k": 1, "save_last": "link"}):
        assert seen[4] == seen[5] == {"step=2.ckpt": None, "last.ckpt": "step=2.ckpt"}
    assert contents(tmp_path) == {"step=6.ckpt": None, "last.ckpt": "step=6.ckpt"}
    assert verify(tmp_path / "last.ckpt") == []
    assert len(list(tmp_path.iterdir())) == 2


def test_there_is_no_link_before_there_is_a_checkpoint(ranks, tmp_path):
    put(tmp_path, "step=2.ckpt.hold")
    names = {"save_last": "link", "save_top_k": 1}
    for _, seen in ranks(2, watched, tmp_path, TP2, 3, saver=names):
        assert seen[2] == seen[3] == {}
    assert contents(tmp_path)["last.ckpt"] == "step=6.ckpt"


def saves_and_loads(folder: Path) -> Any:
    """A checkpoint that is loaded in the step after it was begun, and one that is used as soon as fit is over."""

    def save_and_load(trainer: Any, module: Any) -> None:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        trainer.save_checkpoint(folder / "now.ckpt")
        trainer.strategy.load_checkpoint(folder / "now.ckpt")
        assert all(value.equal(before[name]) for name, value in module.state_dict().items())

    losses = train(folder, TP2, At(3, save_and_load), max_steps=4)
    trainer = train.trainer  # type: ignore[attr-defined]
    trainer.save_checkpoint(folder / "after.ckpt")
    assert verify(folder / "after.ckpt") == [], "outside of fit a save is complete when it returns"
    rest = train(folder, TP2, ckpt_path=str(folder / "step=4.ckpt"))
    (found,) = train.trainer.validate(  # type: ignore[attr-defined]
        GPTModule("llama-tiny", **SIZES), loader(), ckpt_path=str(folder / "after.ckpt"), verbose=False
    )
    return losses + rest, found["val_loss"]


def test_what_is_being_saved_can_be_loaded_at_once(ranks, tmp_path):
    expected = ranks(2, train, tmp_path / "whole", {**TP2, "async_save": False})[0]
    results = ranks(2, saves_and_loads, tmp_path / "run")
    assert results[0][0] == expected
    assert results[0] == results[1]


# what fails


def failing(folder: Path, *callbacks: Callback, kind: type[BaseException] = CheckpointError, **options: Any) -> Any:
    with pytest.raises(kind) as error:
        train(folder, TP2, *callbacks, **options)
    return str(error.value), train.trainer.global_step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "steps", [pytest.param(6, marks=pytest.mark.slow, id="at the next save"), pytest.param(5, id="at the end")]
)
def test_an_error_of_the_writer_is_told_by_all_ranks_and_the_checkpoint_before_stays(ranks, tmp_path, steps):
    whole = ranks(2, train, tmp_path / "whole", TP2)[0]
    tmp_path /= "run"
    put(tmp_path, "step=4.ckpt.full")
    saver = {"save_top_k": 1, "save_last": "link"}
    results = ranks(2, failing, tmp_path, max_steps=steps, saver=saver)
    assert results[0] == results[1]
    text, step = results[0]
    assert step == steps, "training went on"
    assert text == f"saving {tmp_path}/step=4.ckpt:\n  rank 1: OSError: [Errno 28] No space left on device"
    assert contents(tmp_path) == {"step=2.ckpt": None, "last.ckpt": "step=2.ckpt"}
    assert verify(tmp_path / "last.ckpt") == []
    assert not (tmp_path / ".unfinished").exists()
    (tmp_path / "step=4.ckpt.full").unlink()
    assert ranks(2, train, tmp_path, TP2, saver=saver, ckpt_path="last")[0] == whole[2:]


def fails(trainer: Any, module: Any) -> None:
    raise RuntimeError("on purpose")


def test_an_error_of_the_writer_does_not_hide_another_one(ranks, tmp_path):
    put(tmp_path, "step=4.ckpt.full")
    for text, _ in ranks(2, on_exception, tmp_path):
        assert text == "on purpose"
    assert contents(tmp_path).keys() == {"step=2.ckpt", "on_exception.ckpt"}
    assert verify(tmp_path / "on_exception.ckpt") == []


def on_exception(folder: Path) -> Any:
    return failing(folder, At(5, fails), OnExceptionCheckpoint(folder), kind=RuntimeError)


def switched(folder: Path) -> Any:
    def touch(trainer: Any, module: Any) -> None:
        put(folder, "stop")

    switch = KillSwitch(folder / "stop", check_every=0.0)
    with pytest.raises((CheckpointError, SystemExit)) as leave:
        train(folder, TP2, At(2, touch, 0), switch)
    return str(leave.value)


def test_the_kill_switch_leaves_when_its_checkpoint_is_durable_and_not_with_0_if_it_is_not(ranks, tmp_path):
    assert ranks(2, switched, tmp_path / "good") == ["0", "0"]
    assert verify(tmp_path / "good" / "last.ckpt") == []
    put(tmp_path / "bad", "last.ckpt.full")
    for text in ranks(2, switched, tmp_path / "bad"):
        assert "last.ckpt:\n  rank 1: OSError" in text
    assert contents(tmp_path / "bad").keys() == {"step=2.ckpt", "step=4.ckpt"}, "the last step's hooks had all run"


def test_what_verify_checkpoint_finds_ends_the_run_and_the_checkpoint_before_stays(ranks, tmp_path):
    ranks(2, verified, tmp_path / "good")
    assert contents(tmp_path / "good").keys() == {"step=2.ckpt", "step=4.ckpt", "step=6.ckpt"}
    for text, _ in ranks(2, nudged, tmp_path / "bad"):
        assert "step=4.ckpt:\n  rank 0: ranks do not hold the same" in text
        assert "norm" in text
    assert contents(tmp_path / "bad").keys() == {"step=2.ckpt"}


def verified(folder: Path) -> None:
    train(folder, TP2, VerifyCheckpoint())


def nudged(folder: Path) -> Any:
    return failing(folder, VerifyCheckpoint(), After(4, nudge_a_norm, 1), saver={"save_top_k": 1})

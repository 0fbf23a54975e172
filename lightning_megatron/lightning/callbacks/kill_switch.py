"""A run that is asked to stop ends a step, saves, and exits with 0; no rank is left waiting for another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron.lightning.checkpoint_strategy import CheckpointStrategy

_Handler = Callable[[int, FrameType | None], Any] | int | None


class KillSwitch(Callback):
    """Ends training in order when a file appears, or on SIGTERM and SIGUSR1.

    Rank 0 alone looks for the file; a signal may reach any rank. Neither does anything at once: at the end of an
    optimizer step all ranks ask each other, and if one was told to stop, all save a checkpoint and leave ``fit`` with
    ``SystemExit(0)``, so that the process ends with 0 and nothing after ``fit`` runs. If the file is there already when
    ``fit`` begins, the run ends before the model is built. The file is never removed: a job that is queued again ends
    at once, too.

    The checkpoint has the name that ``ckpt_path="last"`` looks for, in the directory of the first ``ModelCheckpoint``,
    or ``checkpoints/`` in the Trainer's ``default_root_dir``. It holds the run in mid-epoch, as it is.

    Lightning's own handling of SIGTERM is set aside while training runs: it sends from inside the signal handler, and
    ends the run without a checkpoint. SIGUSR1 is left to whoever has a handler for it, such as Lightning's requeueing
    on SLURM. Callbacks that come after this one have not seen the last batch when the checkpoint is written, so put it
    after those that keep state of their own; Lightning's checkpoint callbacks come last by themselves.

    Args:
        path: the file; ``None`` to listen to signals only.
        check_every: seconds between two looks at the file.
        signals: names of the signals to listen to.

    Attributes:
        reason: why the run was stopped; ``None`` while it was not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        check_every: float = 5.0,
        signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1"),
    ) -> None:
        self.path = None if path is None else Path(path)
        self.reason: str | None = None
        self._every, self._signals = check_every, signals
        self._looked = float("-inf")
        self._seen_step = 0
        self._told: str | None = None
        self._leaving = False
        self._before: dict[int, _Handler] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the run if the file is there already."""
        if stage != TrainerFn.FITTING:
            return
        self.reason = self._told = None
        self._leaving = False
        found = trainer.is_global_zero and self.path is not None and self.path.exists()
        if trainer.strategy.broadcast(found):
            self.reason = f"{self.path} is there"
            rank_zero_info(f"KillSwitch: {self.reason}: the run ends before training. Remove it to train.")
            raise SystemExit(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals, now that Lightning has set its own handlers."""
        self._seen_step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            for name in self._signals:
                self._listen(name)

    def _listen(self, name: str) -> None:
        number = getattr(signal, name, None)  # not every system has SIGUSR1
        if number is None:
            return
        before = signal.getsignal(number)
        if name != "SIGTERM" and before not in (None, signal.SIG_DFL):
            rank_zero_info(f"KillSwitch: {name} is left to its present handler")
            return
        self._before[number] = before
        signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = signal.Signals(number).name  # nothing else: a handler may run inside a collective

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an optimizer step, agree; if any rank was told to stop, save and leave."""
        # Not in the middle of an accumulation, whose gradients would be lost.
        if self._leaving or trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        if trainer.is_global_zero and self._told is None and self._file_appeared():
            self._told = f"{self.path} appeared"
        if trainer.strategy.reduce_boolean_decision(self._told is not None, all=False):
            self._stop(trainer)

    def _file_appeared(self) -> bool:
        now = time.monotonic()
        if self.path is None or now - self._looked < self._every:
            return False
        self._looked = now
        return self.path.exists()

    def _stop(self, trainer: Trainer) -> None:
        self.reason = self._told or "another rank was told to stop"
        checkpoint = trainer.strategy.broadcast(checkpoint_path(trainer))
        rank_zero_info(f"KillSwitch: {self.reason}: saving step {trainer.global_step} to {checkpoint}, then leaving")
        trainer.save_checkpoint(checkpoint)
        self._leaving = True

    # Lightning logs a step after its last hook. So the run is left at the next hook, whichever of these that is.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave."""
        self._leave_if_stopped(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave."""
        self._leave_if_stopped(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave."""
        self._leave_if_stopped(trainer)

    def _leave_if_stopped(self, trainer: Trainer) -> None:
        if not self._leaving:
            return
        if isinstance(trainer.strategy, CheckpointStrategy):
            trainer.strategy.finish_save()  # its error is not to be lost behind the exit
        raise SystemExit(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give signals back."""
        self._give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give signals back."""
        self._give_back()

    def _give_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())


def checkpoint_path(trainer: Trainer) -> str:
    """Where ``ckpt_path="last"`` will find the checkpoint of a run that is stopped now."""
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    if not savers or savers[0].dirpath is None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        return str(folder / f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}")
    counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
    return savers[0].format_checkpoint_name({**trainer.callback_metrics, **counts}, savers[0].CHECKPOINT_NAME_LAST)

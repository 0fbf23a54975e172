"""Orderly stop of a run on request: end a step, save, and exit, with no rank left waiting for another."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_megatron.arguments import Check, at_least, checked
from lightning_megatron.comm.objects import all_gather_object
from lightning_megatron.lightning.compat._private import drop_signal_broadcast
from lightning_megatron.lightning.run_state.random_state import random_state, restore_random_state
from lightning_megatron.lightning.stopping.agreement import Agreement
from lightning_megatron.lightning.stopping.requeue import lead_requeued_job, requeue, requeue_signal
from lightning_megatron.lightning.stopping.signals import StopSignals, signal_problems
from lightning_megatron.lightning.strategy.checkpoints import RunCheckpoints
from lightning_megatron.lightning.streams.evaluation import may_stay_away
from lightning_megatron.lightning.validation.saving import saves_checkpoints
from lightning_megatron.mesh import Axis

# Ranks exchange a signal number; flag bits above it win the maximum.
_REQUEUE = 1 << 8
_FILE = 1 << 9


class KillSwitch(Callback):
    """Stops training cleanly on SIGTERM, SIGUSR1 or SIGINT (Ctrl-C), or when a file appears.

    ``MegatronStrategy`` adds one for signals: add your own only for a file, or for other signals.

    Only rank 0 looks for the file; a signal may reach any rank. Neither acts at once: at the end of each optimizer step
    all ranks exchange their requests to stop, and get the result one step later. Then all save a checkpoint and leave
    ``fit`` with ``SystemExit``, so that nothing after ``fit`` runs. In validation the same happens between two batches,
    and a resumed run repeats the validation. Validation ends first if ranks have different numbers of batches, or if a
    hook has put other weights into the model, as `EMAWeightAveraging` does.

    The exit status is 0 after the file, and 128 + its number after a signal, as a shell reports a process that a signal
    has killed (143 for SIGTERM), so that a queue does not take an interrupted job for a complete one. Where Lightning
    has launched the other processes of a node, the first one's status counts, and theirs is 0.

    Until the first step has ended there is nothing to save, and a signal ends the process at once; so does a second
    Ctrl-C, a second or more after the first. If the file exists already when ``fit`` begins, the run ends before the
    model is built. The file is never removed: a requeued job ends at once, too.

    The checkpoint is the last one of the first ``ModelCheckpoint`` with ``save_last``, or of the first one if none has
    it; without a ``ModelCheckpoint`` it is ``checkpoints/last.ckpt`` in the Trainer's ``default_root_dir``. The
    callback's later saves replace it. It holds the state in mid-epoch. On Slurm with requeueing
    (``SLURMEnvironment(auto_requeue=True)``, Lightning's default), the name from which Lightning resumes a requeued job
    is linked to it, too, and after the requeue signal (SIGUSR1) the job is requeued.

    Lightning's own signal handlers are replaced during a run: they communicate, or save, inside the handler, while
    other ranks may be in a collective. A handler of yours for SIGUSR1 or SIGINT is left in place; one for SIGTERM runs
    after ours.

    Args:
        path: the file; ``None`` to listen to signals only.
        check_every: seconds between two checks for the file.
        signals: names of the signals to listen to.
        exit_code: exit status in every case; ``None`` for those described above.
        always_save: save also if the Trainer has no checkpoint callback.

    Attributes:
        reason: cause of the stop; ``None`` if there was none.
    """

    reads_parameters = False

    @checked(check_every=at_least(0), signals=Check(signal_problems))
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        check_every: float = 5.0,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGINT"),
        exit_code: int | None = None,
        always_save: bool = True,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.reason: str | None = None
        self._every, self._exit_code, self._always_save = check_every, exit_code, always_save
        self._signals = StopSignals(signals)
        self._agreement: Agreement | None = None
        self._requeue_signal: int | None = None
        self._looked = float("-inf")
        self._seen_step = 0
        self._file_is_there = False
        self._same_validation = False
        self._weights: list[float] | None = None
        self._told = 0
        self._saved: str | None = None
        self._linking: ModelCheckpoint | None = None
        self._ended: tuple[dict[str, Any], Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the run if the file is there already."""
        self._signals.look()
        self.reason, self._told, self._file_is_there = None, 0, False
        self._agreement = self._saved = self._ended = None
        if stage != TrainerFn.FITTING:
            return
        found = trainer.is_global_zero and self.path is not None and self.path.exists()
        if trainer.strategy.broadcast(found):
            self.reason = f"{self.path} is there"
            rank_zero_info(f"KillSwitch: {self.reason}: the run ends before training. Remove it to train.")
            raise SystemExit(self._exit_code or 0)

    def listen(self, trainer: Trainer) -> None:
        """Set the signal handlers; ``MegatronStrategy`` calls this as soon as Lightning has set its own."""
        self._requeue_signal = requeue_signal(trainer)
        if self._requeue_signal is not None:
            self._signals.add(self._requeue_signal)
        launcher = trainer.strategy.launcher
        self._signals.listen(getattr(launcher, "kill", None))

    def give_back(self) -> None:
        """Restore the previous signal handlers, and ``save_last="link"`` of a callback."""
        self._signals.give_back()
        if self._linking is not None:
            self._linking.save_last, self._linking = "link", None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals."""
        self.listen(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to signals."""
        self.listen(trainer)
        self._seen_step = trainer.global_step
        if (own := _checkpoints(trainer)) is not None:
            mesh = own.ranks.mesh
            drop_signal_broadcast(trainer)  # this callback agrees on signals, on the hosts
            self._agreement = Agreement(mesh.host if mesh.is_distributed else None, torch.device("cpu"))
        else:
            self._agreement = Agreement(Axis("world") if dist.is_initialized() else None, trainer.strategy.root_device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an optimizer step, agree; if any rank was told to stop, note where the run is in its data."""
        # Not in the middle of an accumulation, whose gradients would be lost.
        if self._told or (step := trainer.global_step) == self._seen_step or self._agreement is None:
            return
        self._seen_step = step
        self._signals.waits = True
        self._told = self._agreement.ask(self._own_word(trainer))
        if self._told:
            own = _checkpoints(trainer)
            random = None if own is None else random_state(own.ranks.mesh.rng)
            self._ended = deepcopy(trainer.fit_loop.state_dict()), random

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the progress at the end of the last batch, though the next one has been read since."""
        if self._ended is not None:
            checkpoint["loops"]["fit_loop"] = self._ended[0]

    def _own_word(self, trainer: Trainer) -> int:
        """This rank's number for the agreement; 0 if it was not told to stop."""
        if self.path is not None and trainer.is_global_zero and (now := time.monotonic()) - self._looked >= self._every:
            self._looked = now
            self._file_is_there = self.path.exists()
        noted = self._signals.noted
        word = max(noted, default=0) | (_FILE if self._file_is_there else 0)
        return _REQUEUE | word if self._requeue_signal in noted else word

    def _save(self, trainer: Trainer) -> None:
        number = self._told % _REQUEUE
        self.reason = f"{self.path} appeared" if self._told & _FILE else signal.Signals(number).name
        if not self._always_save and not saves_checkpoints(trainer):
            rank_zero_info(f"{self.reason}: leaving at step {trainer.global_step}; the Trainer saves no checkpoints")
            return
        checkpoint = trainer.strategy.broadcast(checkpoint_path(trainer))
        rank_zero_info(f"{self.reason}: saving step {trainer.global_step} to {checkpoint}, then leaving")
        replaced = self._take_over_last(trainer, checkpoint)
        trainer.save_checkpoint(checkpoint, weights_only=False)  # Lightning's default, which it logs
        if (own := _checkpoints(trainer)) is not None:
            own.finish()  # the exit must not hide its error
        self._saved = checkpoint
        if replaced is not None:
            trainer.strategy.remove_checkpoint(replaced)

    def _take_over_last(self, trainer: Trainer, checkpoint: str) -> str | None:
        """Make a checkpoint the last one of a callback, before it is saved with the callback's state.

        Otherwise the callback, now or in the resumed run, would take it for another run's, and never replace it. In
        the present step the callback may still save: it must not link the name to an older checkpoint then.

        Returns:
            The last checkpoint before, if it is to be removed: not if this run was resumed from it, as in Lightning.
        """
        saver = _last_saver(trainer)
        if saver is None:
            return None
        if saver.save_last == "link":
            saver.save_last, self._linking = True, saver
        before, saver.last_model_path = saver.last_model_path, checkpoint
        resumed_from = trainer.ckpt_path and os.path.abspath(trainer.ckpt_path)
        return None if before in ("", checkpoint) or os.path.abspath(before) == resumed_from else before

    # The module's own hook of a step runs after those of callbacks, and Lightning logs the step after that. So the run
    # ends at the next hook, whichever of these that is.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save and leave ``fit`` if the ranks have agreed to stop."""
        self._end_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save and leave ``fit`` if the ranks have agreed to stop."""
        self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        """If the ranks have agreed to stop, save what all hooks of the last step have left, and leave ``fit``."""
        if not self._told:
            return
        if trainer.validating:
            self._leave_validation(trainer)
        if self._ended is not None:
            own, (_, random) = _checkpoints(trainer), self._ended
            if own is not None:
                restore_random_state(random, own.ranks.mesh.rng)
            self._save(trainer)
        self._leave(trainer)

    def begin_validation(self, trainer: Trainer) -> None:
        """Before hooks change the model for a validation, agree, and find out if ranks can agree during it.

        If any rank was told to stop, leave with a checkpoint that repeats this validation.
        """
        if trainer.sanity_checking or self._agreement is None:
            return
        self._same_validation = _validates_alike(trainer)
        if self._same_validation:
            self._told = self._told or self._agreement.answer()
            self._weights = _norms(trainer)
        self._end_step(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave with a checkpoint that repeats this validation."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_step(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Agree; if any rank was told to stop, save and leave."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or self._agreement is None:
            return
        if self._weights is not None:
            changed, self._weights = _norms(trainer) != self._weights, None
            self._same_validation = not self._agreement.ask_now(int(changed))
        if self._same_validation and self._signals.waits:
            self._told = self._agreement.ask(self._own_word(trainer))
            if self._told:
                self._leave_validation(trainer)

    def _leave_validation(self, trainer: Trainer) -> NoReturn:
        self._ended = None
        validate_anew(trainer)
        if (own := _checkpoints(trainer)) is not None:
            own.randomness.rewind_validation()
        self._save(trainer)
        self._leave(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Agree for the last time; from here on a signal ends the process at once."""
        if self._agreement is not None and not self._told:
            self._told = self._agreement.ask_now(self._own_word(trainer))
            self._signals.waits = False
            if self._told:
                self._save(trainer)
        self._end_step(trainer)
        if _checkpoints(trainer) is None:
            self.give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the signal handlers, unless ``MegatronStrategy`` does."""
        if _checkpoints(trainer) is None:
            self.give_back()

    def _leave(self, trainer: Trainer) -> NoReturn:
        if trainer.is_global_zero and self._requeue_signal is not None and self._saved is not None:
            lead_requeued_job(trainer.default_root_dir, self._saved)
            if self._told & _REQUEUE:
                requeue()
        if not self._told & _FILE:
            self._signals.await_own()
        raise SystemExit(self._own_exit_code(trainer) if self._exit_code is None else self._exit_code)

    def _own_exit_code(self, trainer: Trainer) -> int:
        strategy = trainer.strategy
        environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
        # Lightning kills the whole job when a process that it has launched ends with anything else.
        is_launched = isinstance(environment, LightningEnvironment) and environment.local_rank() > 0
        return 0 if self._told & _FILE or is_launched else 128 + self._told % _REQUEUE


class BeforeNextStep(Callback):
    """Ends a run for a :class:`KillSwitch` before other callbacks begin a batch, a validation or an epoch's end."""

    reads_parameters = False

    def __init__(self, switch: KillSwitch) -> None:
        self._switch = switch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:  # noqa: D102
        self._switch.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: D102
        self._switch.on_train_epoch_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:  # noqa: D102
        if trainer.state.fn == TrainerFn.FITTING:
            self._switch.begin_validation(trainer)


def checkpoint_path(trainer: Trainer) -> str:
    """Path at which ``ckpt_path="last"`` will find the checkpoint of a run that is stopped now.

    It is spelled as ``ModelCheckpoint`` spells it, which compares paths as text.
    """
    saver = _last_saver(trainer)
    if saver is None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        return str(folder / f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}")
    counts = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
    name = partial(saver.format_checkpoint_name, {**trainer.callback_metrics, **counts}, saver.CHECKPOINT_NAME_LAST)
    return _own_version(name, saver.STARTING_VERSION, (saver.last_model_path, trainer.ckpt_path))


def _last_saver(trainer: Trainer) -> ModelCheckpoint | None:
    """The callback that keeps the last checkpoint: the first one with ``save_last``, or else the first one."""
    callbacks = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
    savers = [saver for saver in callbacks if saver.dirpath is not None]
    return next((saver for saver in savers if saver.save_last), savers[0] if savers else None)


def _own_version(name: Callable[..., str], first: int, own: Iterable[str | os.PathLike[str] | None]) -> str:
    """The first free version of a name (``last.ckpt``, ``last-v1.ckpt``), or the one that this run has made before.

    Args:
        name: function that returns the path of a version ``ver``, and the plain path without an argument.
        first: number of the first version.
        own: checkpoints that this run has written or resumed from; those of other runs are not overwritten.
    """
    folder, plain = os.path.split(name())
    stem, suffix = os.path.splitext(plain)
    for known in (Path(os.path.abspath(other)) for other in own if other):
        is_here = known.parent.resolve() == Path(folder).resolve()
        if is_here and re.fullmatch(rf"{re.escape(stem)}(-v\d+)?{re.escape(suffix)}", known.name):
            return os.path.join(folder, known.name)
    versions = (name(ver=number) for number in itertools.count(first))
    return next(path for path in itertools.chain([name()], versions) if not os.path.lexists(path))


def validate_anew(trainer: Trainer) -> None:
    """Reset the progress of the present validation to its first batch, from which Lightning then resumes.

    Otherwise it would resume with the remaining batches, and take their mean for that of all.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.reset_on_run()
    total: Any = progress.total
    total.ready = total.started = total.processed = total.completed
    progress.increment_ready()
    progress.increment_started()


def _validates_alike(trainer: Trainer) -> bool:
    """True if all ranks go through the same number of validation batches, and so can agree between two of them."""
    own, counts = _checkpoints(trainer), list(trainer.num_val_batches)
    if own is None or may_stay_away(trainer, own.ranks.mesh.layout):
        return False
    return float("inf") not in counts and all(other == counts for other in all_gather_object(own.ranks.mesh, counts))


def _checkpoints(trainer: Trainer) -> RunCheckpoints | None:
    """The checkpoints of ``MegatronStrategy``; ``None`` with another strategy."""
    found = getattr(trainer.strategy, "checkpoints", None)
    return found if isinstance(found, RunCheckpoints) else None


def _norms(trainer: Trainer) -> list[float]:
    """Norms of the weights and buffers of this rank, which show if a hook has put other ones into the model."""
    state = trainer.strategy.lightning_module_state_dict().values()
    values = [value.detach() for value in state if torch.is_tensor(value) and value.is_floating_point()]
    norms = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in values]
    return torch.stack(norms).tolist() if norms else []

"""Record of a rank's actions, and a watch over those of other ranks, which names the rank that made a job fail."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from lightning_megatron import device as devices
from lightning_megatron.comm.rendezvous import Meeting, Store
from lightning_megatron.errors import described
from lightning_megatron.lightning.compat._private import trainer_of
from lightning_megatron.lightning.launch.children import GRACE, Children
from lightning_megatron.lightning.monitoring.hook_marks import HookMarks
from lightning_megatron.lightning.strategy.ranks import JobRanks
from lightning_megatron.machine.transport import is_lost_connection
from lightning_megatron.recorder.call import Call, PeerLostError, peer_lost_error
from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.process import ProcessState
from lightning_megatron.recorder.recorder import Recorder, Span, note_process_state
from lightning_megatron.recorder.runs import remove_finished, remove_old, run_folder
from lightning_megatron.recorder.watch import PeerWatch

_PARTS = (Kind.OPTIMIZER_STEP, Kind.TRAINING_STEP, Kind.BACKWARD)
_TOGETHER = timedelta(seconds=3)
"""Time within which ranks that fail together raise their errors; a rank that does not is then ended by its watch."""
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class ActionRecord:
    """The record of this rank, in a file that outlives it, and the watch over the other ranks' records.

    Attributes:
        error: error that ends this rank's run; ``None`` if there is none.
    """

    def __init__(self, ranks: JobRanks) -> None:
        self._ranks, self._strategy = ranks, ranks.strategy
        self._watch: PeerWatch | None = None
        self._marks: HookMarks | None = None
        self._makes_group = False
        self._failures: Meeting | None = None
        self._have_all_raised: bool | None = None
        self.error: BaseException | None = None

    def begin_run(self, store: Store) -> None:
        """Reset the error of the previous run; every rank calls this."""
        self.error = self._have_all_raised = None
        self._failures = Meeting(store, self._strategy.global_rank, self._strategy.world_size, "failures")

    @property
    def _recorder(self) -> Recorder:
        return self._ranks.recorder

    def during(self, kind: Kind, detail: str = "") -> Span:
        """Context manager that records a phase, at once entered; ``detail`` is its subject, such as a path."""
        action_log, module = self._ranks.recorder.main, self._strategy.lightning_module
        if self._marks is not None:
            self._marks.end()
        # Automatic optimization runs these once a batch; the strategy writes the number when the batch begins.
        is_part = kind in _PARTS and module is not None and module.automatic_optimization
        if not is_part and (trainer := trainer_of(module)) is not None:
            action_log.step = trainer.global_step
        return Span(action_log, kind, detail)

    def mark(self, kind: Kind) -> None:
        """Begin a phase that ends with the next one."""
        if self._marks is not None:
            self._marks.begin(kind)

    # Starting

    def meet(self, meet: Callable[[], Result]) -> Result:
        """Run the rendezvous of all ranks; an error names those that do not join."""
        strategy = self._strategy
        self._makes_group = strategy.world_size > 1 and not dist.is_initialized()
        if self._makes_group:
            assert strategy.cluster_environment is not None
            self._open(run_folder(self._root, str(strategy.cluster_environment.main_port)))
            self._watch_peers()
        return self.connect(meet)

    def connect(self, connect: Callable[[], Result]) -> Result:
        """Connect to the other ranks; an error names those that do not join."""
        return Call(self._recorder.main, Kind.RENDEZVOUS, "world", 0).run(connect) if self._makes_group else connect()

    def begin(self, trainer: Trainer | None) -> list[Callback]:
        """Move the record to the folder of rank 0; the process groups must exist.

        Returns:
            The callback, if any, that records what happens between phases.
        """
        strategy, mesh = self._strategy, self._ranks.mesh
        self._ranks.recorder = mesh.recorder
        if self._recorder.folder is None:
            self._open(run_folder(self._root, f"{os.getpid()}-{time.time_ns()}"), only=strategy.is_global_zero)
        own = self._recorder.folder
        theirs = self._ranks.broadcast(None if own is None else str(own))
        if theirs is not None and (own is None or str(own) != theirs) and os.path.isdir(theirs):
            self._recorder.close(remove=True)
            self._open(Path(theirs))
        self._recorder.describe({"mesh": repr(mesh)})
        self._watch_peers()
        if trainer is None or self._recorder.folder is None:
            return []
        self._marks = HookMarks(self._recorder.main, trainer, self._runs_ahead)
        return [self._marks]

    def _open(self, folder: Path, only: bool = True) -> None:
        if not (self._ranks.job.record_actions and only):
            return
        rank, world_size, device = self._strategy.global_rank, self._strategy.world_size, self._strategy.root_device
        timing = {"runs_ahead": self._runs_ahead, "timeout": self._ranks.timeout.total_seconds()}
        devices.keep_flight_records(device, str(folder))
        try:
            if self._strategy.is_global_zero:
                remove_old(self._root)
            self._recorder.open(folder, rank, world_size)
            self._recorder.describe({"host": socket.gethostname(), "device": str(device), **timing})
        except OSError as error:
            _log.warning("actions of rank %d are not written down: %s", rank, error)

    def _watch_peers(self) -> None:
        self._stop_watch()
        strategy = self._strategy
        if self._recorder.folder is not None and strategy.world_size > 1:
            rank, first = strategy.global_rank, strategy.node_rank * self._ranks.num_local
            local, seconds = range(first, first + self._ranks.num_local), self._ranks.timeout.total_seconds()
            children = self._end_children, self._dead_children
            # torchrun ends its ranks, unless it is killed itself: then they would train on, out of anybody's sight.
            launcher = os.getppid() if dist.is_torchelastic_launched() else None
            self._watch = PeerWatch(self._recorder, rank, local, strategy.world_size, seconds, *children, launcher)
            if self._makes_group:  # else this process is not ended by force
                self._watch.start()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    @property
    def _runs_ahead(self) -> bool:
        return not devices.collective_traits(self._strategy.root_device).wait_blocks

    @property
    def _root(self) -> str:
        trainer = trainer_of(self._strategy.lightning_module)
        return "." if trainer is None else str(trainer.default_root_dir)

    # Processes that this one has launched

    @property
    def _children(self) -> Children | None:
        return getattr(self._strategy.launcher, "children", None)

    def _end_children(self) -> None:
        for rank in [] if self._children is None else self._children.end():
            if self._recorder.folder is not None:
                note_process_state(self._recorder.folder, rank, ProcessState.ENDED_BY_LAUNCHER, 0)

    def _dead_children(self) -> Mapping[int, int]:
        return {} if self._children is None else self._children.failed

    # The end

    def note_error(self, error: BaseException) -> bool:
        """Record and log the error that ends this rank's run, and the rank that caused it.

        Args:
            error: error; if a connection was lost, a note with the lost rank is added to it.

        Returns:
            True if all ranks have raised an error in this step, and so can still save together.
        """
        if error is not self.error:
            self._write(error)
            reported = () if self._watch is None else (State.LOST,)  # by the watch
            if self._recorder.state not in (State.FINISHED, *reported):
                self._ranks.log_error(error)
            if isinstance(error, Exception):
                vars(error)["is_printed_here"] = self._is_first
        return self.all_have_raised

    @property
    def _is_first(self) -> bool:
        """True if this rank raised the first error, or else lost the first peer; rank 0 if all failed at once."""
        failed = [] if self._watch is None else self._watch.views()
        order = [(v.state == State.LOST, v.since, v.rank) for v in failed if v.state in (State.RAISED, State.LOST)]
        own = self._strategy.global_rank
        return own == (0 if self.all_have_raised else min(order, default=(False, 0, own))[2])

    def _write(self, error: BaseException) -> None:
        self.error = error
        self._recorder.main.keep_failed(error)
        if self._watch is not None and self._strategy.launcher is not None:
            self._watch.give_time(GRACE)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerLostError):
            cause = cause.__cause__
        if isinstance(error, SystemExit) and self.all_have_raised:
            self._recorder.set_state(State.FINISHED)
        elif cause is not None:
            self._recorder.set_state(State.LOST, str(cause))
        elif is_lost_connection(error) and self._watch is not None:
            named = peer_lost_error(self._recorder.main, "a collective")
            if hasattr(error, "add_note"):
                error.add_note(str(named))
            else:
                _log.error("%s", named)
        else:
            self._recorder.set_state(State.RAISED, described(error))

    @property
    def all_have_raised(self) -> bool:
        """True if all ranks have raised an error in the same step; this rank has, and briefly waits for the others."""
        if self._failures is None:
            return True
        if self._have_all_raised is None:
            step = getattr(trainer_of(self._strategy.lightning_module), "global_step", None)
            is_first = self._recorder.state != State.LOST
            self._have_all_raised = is_first and self._failures.all_say(str(step), _TOGETHER)
        return self._have_all_raised

    def require_peers(self, path: Any) -> None:
        """Refuse to save on a rank that fails alone: the save would wait for ranks that do not join it.

        Raises:
            BaseException: the error that ends this rank's run.
        """
        if self.error is not None and not self.all_have_raised:
            why = "a save needs all ranks, and not all of them have raised an error in this step"
            _log.error("%s is not saved: %s. The error: %s", path, why, described(self.error))
            raise self.error

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record the end of a run, and close the record, which is deleted once all ranks have finished the run."""
        try:
            with self.during(Kind.END):
                yield
        except BaseException as error:
            self._write(error)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._marks is not None:
            self._marks.end()
        self._stop_watch()
        self._marks = self.error = None  # whose traceback holds the frames of the run
        folder = self._recorder.folder
        self._recorder.set_state(State.FINISHED)
        self._recorder.close()
        if folder is not None:
            remove_finished(folder)

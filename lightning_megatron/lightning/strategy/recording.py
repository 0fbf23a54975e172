"""A strategy that writes down what its rank does, and names the rank that a failed job is to be blamed on."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_megatron.comm.rendezvous import Store
from lightning_megatron.lightning.children import GRACE
from lightning_megatron.lightning.launcher import CheckedLauncher
from lightning_megatron.lightning.monitoring.hook_marks import HookMarks
from lightning_megatron.lightning.strategy.stopping import StoppableStrategy
from lightning_megatron.machine.transport import is_lost_connection
from lightning_megatron.mesh import ParallelMesh
from lightning_megatron.recorder.call import Call, PeerLostError, peer_lost_error
from lightning_megatron.recorder.file_format import Kind, State
from lightning_megatron.recorder.process import ProcessState
from lightning_megatron.recorder.recorder import note_process_state
from lightning_megatron.recorder.runs import remove_finished, remove_old, run_folder
from lightning_megatron.recorder.watch import PeerWatch

_log = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])


def recorded(kind: Kind) -> Callable[[Method], Method]:
    """Bracket a method of the strategy in the record of its rank.

    Args:
        kind: what it is.
    """

    def around(method: Method) -> Method:
        @wraps(method)
        def inside(self: RecordedStrategy, *args: Any, **kwargs: Any) -> Any:
            with self.during(kind):
                return method(self, *args, **kwargs)

        return cast(Method, inside)

    return around


class RecordedStrategy(StoppableStrategy):
    """Every rank's actions are kept, and watched by the others."""

    _record_actions: bool = True
    _watch_of_peers: PeerWatch | None = None
    _marks: HookMarks | None = None
    _makes_group: bool = False

    # The record

    @contextmanager
    def during(self, kind: Kind, detail: str = "") -> Iterator[None]:
        """Bracket a phase in the record of this rank.

        Args:
            kind: which.
            detail: what it is about, such as a path.
        """
        action_log, module = self._recorder.main, self.lightning_module
        if self._marks is not None:
            self._marks.end()
        if module is not None and module._trainer is not None:
            action_log.step = module._trainer.global_step
        with action_log.during(kind, detail):
            yield

    def _meet(self) -> Store | None:
        """Meet the other ranks; who does not come is named."""
        self._makes_group = self.world_size > 1 and not dist.is_initialized()
        if not self._makes_group:
            return super()._meet()
        assert self.cluster_environment is not None
        self._open_record(run_folder(self._root, str(self.cluster_environment.main_port)))
        self._watch_peers()
        return Call(self._recorder.main, Kind.RENDEZVOUS, "world", 0).run(super()._meet)

    def _create_mesh(self) -> ParallelMesh:
        """Connect to the other ranks; who does not come is named."""
        if not self._makes_group:
            return super()._create_mesh()
        return Call(self._recorder.main, Kind.RENDEZVOUS, "world", 0).run(super()._create_mesh)

    def _begin_record(self, trainer: Trainer | None) -> None:
        """Write where rank 0 does; the groups are there."""
        self._recorder = self.mesh.recorder
        if self._recorder.folder is None:
            self._open_record(run_folder(self._root, f"{os.getpid()}-{time.time_ns()}"), only=self.is_global_zero)
        own = self._recorder.folder
        theirs = self.broadcast(None if own is None else str(own))
        if theirs is not None and (own is None or str(own) != theirs) and os.path.isdir(theirs):
            self._recorder.close(remove=True)
            self._open_record(Path(theirs))
        about = {"host": socket.gethostname(), "device": str(self.root_device), "mesh": repr(self.mesh)}
        self._recorder.describe(about)
        self._watch_peers()
        if trainer is not None and self._recorder.folder is not None:
            self._marks = HookMarks(self._recorder.main)
            self._marks.attach(trainer)

    def _open_record(self, folder: Path, only: bool = True) -> None:
        if not (self._record_actions and only):
            return
        try:
            if self.is_global_zero:
                remove_old(self._root)
            self._recorder.open(folder, self.global_rank, self.world_size)
            self._recorder.describe({"host": socket.gethostname(), "device": str(self.root_device)})
        except OSError as error:
            _log.warning("actions of rank %d are not written down: %s", self.global_rank, error)

    def _watch_peers(self) -> None:
        if self._watch_of_peers is not None:
            self._watch_of_peers.stop()
            self._watch_of_peers = None
        if self._recorder.folder is not None and self.world_size > 1:
            seconds, own = self._timeout.total_seconds(), (self._makes_group, self._end_children, self._dead_children)
            rank, first = self.global_rank, self.node_rank * self.num_processes
            local = range(first, first + self.num_processes)
            self._watch_of_peers = PeerWatch(self._recorder, rank, local, self.world_size, seconds, *own)
            self._watch_of_peers.start()

    @property
    def _root(self) -> str:
        module = self.lightning_module
        return "." if module is None or module._trainer is None else str(module._trainer.default_root_dir)

    # Processes that this one has launched

    def _end_children(self) -> None:
        if isinstance(self.launcher, CheckedLauncher):
            for rank in self.launcher.end_children():
                if self._recorder.folder is not None:
                    note_process_state(self._recorder.folder, rank, ProcessState.ENDED_BY_LAUNCHER, 0)

    def _dead_children(self) -> Mapping[int, int]:
        return self.launcher.dead_children() if isinstance(self.launcher, CheckedLauncher) else {}

    # The end

    def note_error(self, error: BaseException) -> None:
        """Write down that the run of this rank ends in an error, and who is to blame for it.

        Args:
            error: a lost connection that nobody has named a rank for gets a note that does.
        """
        self._recorder.main.keep_failed(error)
        if self._watch_of_peers is not None and self.launcher is not None:
            self._watch_of_peers.give_time(GRACE)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerLostError):
            cause = cause.__cause__
        if isinstance(error, SystemExit):
            self._recorder.set_state(State.FINISHED)
        elif cause is not None:
            self._recorder.set_state(State.LOST, str(cause))
        elif is_lost_connection(error) and self._watch_of_peers is not None:
            named = peer_lost_error(self._recorder.main, "a collective")
            if hasattr(error, "add_note"):
                error.add_note(str(named))
            else:
                _log.error("%s", named)
        else:
            self._recorder.set_state(State.RAISED, f"{type(error).__name__}: {error}")

    def on_exception(self, exception: BaseException) -> None:
        """Write it down before anything else."""
        self.note_error(exception)
        super().on_exception(exception)

    def _end_run(self) -> None:
        """Close the record; a run that all ranks have finished leaves none."""
        try:
            with self.during(Kind.END):
                super()._end_run()
        except BaseException as error:
            self.note_error(error)
            raise
        finally:
            if self._marks is not None:
                self._marks.detach()
            if self._watch_of_peers is not None:
                self._watch_of_peers.stop()
            self._watch_of_peers = self._marks = None
            folder = self._recorder.folder
            self._recorder.set_state(State.FINISHED)
            self._recorder.close()
            if folder is not None:
                remove_finished(folder)

    # Phases that others carry out

    def on_validation_end(self) -> None:
        """In the middle of an epoch, the next batch of training is waited for."""
        super().on_validation_end()
        if self._marks is not None:
            self._marks.begin(Kind.DATA)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As of :class:`~lightning_megatron.lightning.strategy.checkpoints.CheckpointStrategy`."""
        with self.during(Kind.SAVE, str(filepath)):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As of :class:`~lightning_megatron.lightning.strategy.checkpoints.CheckpointStrategy`."""
        with self.during(Kind.LOAD, str(checkpoint_path)):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._marks is not None:
            self._marks.begin(Kind.LOAD)  # hooks that look at it come next
        return checkpoint

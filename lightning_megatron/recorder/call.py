"""Record a collective or a message while it runs; if it fails, raise an error that names the missing rank."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from lightning_megatron.machine.transport import is_lost_connection
from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog

T = TypeVar("T")


class PeerLostError(RuntimeError):
    """Another rank has failed, died, stopped or fallen behind; ``__cause__`` is the error of the backend."""


class Call:
    """A collective or a message of one rank.

    Args:
        action_log: log to write to; ``None`` if this rank records no actions.
        name: name of the group.
        group: number of the group in the file.
        value: tensor to communicate, of which only the size in bytes is recorded.
        peer: source or destination rank of a message.
    """

    __slots__ = ("_action_log", "_group", "_kind", "_name", "_peer", "_size", "_token")

    def __init__(
        self,
        action_log: ActionLog | None,
        kind: Kind,
        name: str,
        group: int,
        value: torch.Tensor | None = None,
        peer: int = -1,
    ) -> None:
        self._action_log, self._kind, self._name, self._group, self._peer = action_log, kind, name, group, peer
        self._size = 0 if value is None else value.nbytes
        self._token = -1

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that runs the collective and blocks until it is done.

        Raises:
            PeerLostError: if it fails because of another rank.
        """
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with self:
            return function(*args, **kwargs)

    def issue(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that only starts the collective; a ``with`` block of this object then waits for its end.

        Raises:
            PeerLostError: if it fails because of another rank.
        """
        if self._action_log is not None:
            self._token = self._action_log.begin(self._kind, self._group, self._size, self._peer, False)
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            self._blame(error)
            raise

    def __enter__(self) -> None:
        action_log = self._action_log
        if action_log is None:
            return
        if self._token < 0:
            self._token = action_log.begin(self._kind, self._group, self._size, self._peer)
        else:
            self._token = action_log.wait(self._token)
        if action_log.clock is not None:
            action_log.clock.begin_wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._action_log is not None and self._action_log.clock is not None:
            self._action_log.clock.end_wait()
        try:
            if isinstance(error, RuntimeError):
                self._blame(error)
        finally:
            if self._action_log is not None:
                self._action_log.end(self._token)

    def _blame(self, error: RuntimeError) -> None:
        if self._action_log is not None:
            self._action_log.keep_failed(error)
        if is_lost_connection(error):
            raise peer_lost_error(self._action_log, str(self)) from error

    def __str__(self) -> str:
        other = f" with rank {self._peer}" if self._peer >= 0 else ""
        return f"{self._kind.name.lower()} over {self._name}{other}"


def peer_lost_error(action_log: ActionLog | None, doing: str) -> PeerLostError:
    """Error for a rank whose collective or message, which ``doing`` describes, failed because of another rank."""
    blame = None if action_log is None else action_log.recorder.blame
    if blame is None:
        said = "a peer has failed, exited or fallen behind; see the output of that rank for the reason"
        return PeerLostError(f"{doing}: {said}")
    return PeerLostError(blame(doing))

"""A rendezvous store for the processes of one machine, unreachable from other machines.

torch's own TCPStore listens on all addresses of the machine, and any client may read and set its keys, which hold the
addresses of ranks and pickled objects. A socket bound to the loopback address prevents that.

The port is bound before any other process learns its number. A port that merely was free may be in use a moment later:
on a busy machine by any connection, or by a process of the job itself, which connects to the store before it listens
and happens to get that port as its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but no stub says so

ADDRESS = "127.0.0.1"
PORT = "MASTER_PORT"


class LoopbackPort:
    """The port of a job on this machine, on which rank 0 listens."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def take(self, main_port: Callable[[], int]) -> None:
        """Choose the port and listen on it, before other processes are started.

        Args:
            main_port: function that returns the job's port. If none is chosen yet, it reads the environment variable
                ``MASTER_PORT``, which is set here.

        Raises:
            OSError: if another process listens on the given port.
        """
        self.free()
        self._socket = _listening(0)
        chosen = self._socket.getsockname()[1]
        os.environ.setdefault(PORT, str(chosen))
        if (wanted := main_port()) != chosen:  # it was given, or chosen before
            self.free()
            self._socket = _listening(wanted)

    def free(self) -> None:
        """Stop listening, unless a store has taken over the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def store(self, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
        """The store of a job whose ranks are all on this machine; rank 0 listens on the port.

        Waiting for another process fails after the timeout.

        Raises:
            OSError: if rank 0 cannot listen on the port.
        """
        listening = None
        if rank == 0:
            held, self._socket = self._socket or _listening(port), None
            listening = held.detach()  # the store closes it
        # In torch 2.6 libuv, the default there, does not accept a listening socket.
        return TCPStore(ADDRESS, port, world_size, rank == 0, timeout, master_listen_fd=listening, use_libuv=False)


def _listening(port: int) -> socket.socket:
    """Socket that listens on the loopback address alone; 0 for any port."""
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((ADDRESS, port))
        own.listen(socket.SOMAXCONN)
    except OSError:
        own.close()
        raise
    return own

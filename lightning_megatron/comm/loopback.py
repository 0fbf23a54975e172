"""A rendezvous store for the processes of one machine, unreachable from other machines.

torch's own TCPStore listens on all addresses of the machine, and any client may read and set its keys, which hold the
addresses of ranks and pickled objects. A socket bound to the loopback address prevents that.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but no stub says so

ADDRESS = "127.0.0.1"


def loopback_store(port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a job whose ranks are all on this machine.

    Args:
        port: port on which rank 0 listens.
        rank: rank of this process.
        world_size: number of processes.
        timeout: time after which waiting for another process fails.

    Raises:
        OSError: if rank 0 cannot listen on the port.
    """
    listening = None
    if rank == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind((ADDRESS, port))
            own.listen(world_size)
            listening = own.detach()  # the store closes it
    return TCPStore(ADDRESS, port, world_size, rank == 0, timeout, master_listen_fd=listening)

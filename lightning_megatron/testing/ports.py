"""Choice of a free port for a job that binds it later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_BELOW = 32768
"""First port that the system may assign to outgoing connections (``net.ipv4.ip_local_port_range``)."""


def free_port() -> int:
    """A port of this machine that is not in use, and that no outgoing connection gets."""
    while True:
        port = random.SystemRandom().randrange(_BELOW // 2, _BELOW)
        with socket.socket() as asked, suppress(OSError):
            asked.bind(("127.0.0.1", port))
            return port

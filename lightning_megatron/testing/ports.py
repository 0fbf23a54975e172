"""A port for a job that takes it later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_BELOW = 32768
"""The system gives ports from here on to outgoing connections (``net.ipv4.ip_local_port_range``), at any moment."""


def free_port() -> int:
    """A port of this machine that nobody uses, and that no outgoing connection gets."""
    while True:
        port = random.SystemRandom().randrange(_BELOW // 2, _BELOW)
        with socket.socket() as asked, suppress(OSError):
            asked.bind(("127.0.0.1", port))
            return port

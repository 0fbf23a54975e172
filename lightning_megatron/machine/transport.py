"""Error texts of collective backends for a lost connection."""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"connection (closed|reset|refused|timed out|was (likely )?closed)|connect(ion)? .*(failed|timed? ?out)"
    r"|broken pipe|timed? ?out|wait timeout|no route to host|remote (process|error)|socket (error|closed)"
    r"|failed to recv|communicator was aborted|unhandled system error|connectfullmesh failed"
    r"|(recvvalue|sendbytes|recvbytes) failed",
    re.IGNORECASE,
)


def is_lost_connection(error: BaseException) -> bool:
    """True if an error of a collective means that another rank has ended or did not answer in time.

    All of torch's backends raise a ``RuntimeError`` for that, as they do for wrong arguments; only the texts differ.
    """
    return isinstance(error, RuntimeError) and bool(_WORDS.search(str(error)))

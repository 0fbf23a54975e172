"""Format of a rank's file: a header, and for each of two threads the unfinished actions and a ring of the last actions.

The layout is a NumPy structured dtype; actions are written by one ``struct.pack_into`` each, which is faster. In the
file of a dead rank every action is complete, except perhaps the last.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

MAGIC = b"LMACTS02"


class Kind(IntEnum):
    """Kinds of actions. Collectives have a group, phases have none."""

    NOTHING = 0
    START = 1
    RENDEZVOUS = 2
    SETUP = 3
    DATA = 4
    FORWARD = 5
    BACKWARD = 6
    INPUT_BACKWARD = 7
    WEIGHT_BACKWARD = 8
    TRAINING_STEP = 9
    OPTIMIZER_STEP = 10
    VALIDATION_STEP = 11
    TEST_STEP = 12
    PREDICT_STEP = 13
    SAVE = 14
    WRITE = 15
    LOAD = 16
    END = 17
    USER = 18
    DEVICE = 19
    ALL_REDUCE = 32
    ALL_GATHER = 33
    REDUCE_SCATTER = 34
    ALL_TO_ALL = 35
    BROADCAST = 36
    BARRIER = 37
    SEND = 38
    RECEIVE = 39
    ALL_GATHER_OBJECT = 40
    GATHER_OBJECT = 41
    SCATTER_OBJECT = 42
    BROADCAST_OBJECT = 43


WORDS = {
    Kind.START: "start",
    Kind.SETUP: "set-up",
    Kind.DATA: "waiting for data",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_BACKWARD: "backward of inputs",
    Kind.WEIGHT_BACKWARD: "backward of weights",
    Kind.TRAINING_STEP: "training step",
    Kind.OPTIMIZER_STEP: "optimizer step",
    Kind.VALIDATION_STEP: "validation step",
    Kind.TEST_STEP: "test step",
    Kind.PREDICT_STEP: "predict step",
    Kind.WRITE: "writing in the background",
    Kind.USER: "hooks and callbacks",
    Kind.DEVICE: "waiting for the device",
}
"""Printed names of kinds; the other kinds are printed as their names in lower case."""


class State(IntEnum):
    """State of a rank's run as the rank itself wrote it; the file of a rank that died still says RUNNING."""

    RUNNING = 0
    FINISHED = 1
    RAISED = 2
    LOST = 3


DEPTH = 8
"""Most levels of nested actions that the stack of a thread holds."""
LAST = 256
"""Number of actions that the ring of a thread holds."""
THREADS = 2
GROUPS = 64
"""Most groups, plus one for actions without a group."""

RECORD = np.dtype(
    [
        *(("number", "<u8"), ("begun", "<i8"), ("waiting", "<i8"), ("ended", "<i8"), ("size", "<u8")),
        *(("within", "<u4"), ("step", "<i4"), ("microbatch", "<i4"), ("peer", "<i4")),
        *(("kind", "<u2"), ("group", "<u2"), ("stage", "<i2"), ("has_detail", "<u2")),
    ]
)
"""An action. ``number`` counts from 1, times are ``time.time_ns()``.

``within`` counts the collectives of the group, or the messages of one kind to or from one rank.
"""
PACKED = struct.Struct("<QqqqQIiiiHHhH")
NUMBER, TIME = struct.Struct("<Q"), struct.Struct("<q")

PROCESS = np.dtype([("state", "<i4"), ("seen", "<i8"), ("status", "<i4")])
"""State of a process as another rank noted it: the state, the time of the note, and the exit status."""
HEADER = np.dtype(
    [
        *(("magic", "S8"), ("pid", "<i4"), ("rank", "<i4"), ("world_size", "<i4"), ("state", "<i4")),
        *(("begun", "<i8"), ("since", "<i8"), ("start", "<i8"), ("beat", "<i8"), ("process", PROCESS)),
    ]
)
"""``begun``: start of the run; ``since``: of the state; ``start``: of the process (ticks); ``beat``: last heartbeat."""
THREAD = np.dtype([("stack", RECORD, DEPTH), ("ring", RECORD, LAST), ("counts", "<u4", GROUPS)])
"""``counts``: collectives begun in each group, by its number."""
_HEAD = (("header", HEADER), ("padding", "V56"), ("detail", "S256"), ("error", "S640"), ("failed", RECORD, DEPTH))
FILE = np.dtype([*_HEAD, ("threads", THREAD, THREADS)])
"""Whole file. ``failed`` is a copy of the stack of unfinished actions, taken where an error was raised."""

assert PACKED.size == RECORD.itemsize
WAITING_AT, ENDED_AT = (RECORD.fields[name][1] for name in ("waiting", "ended"))  # type: ignore[index]
PROCESS_AT = HEADER.fields["process"][1]  # type: ignore[index]


def as_text(text: str, name: str) -> bytes:
    """Encode a text for a field; cut a long one in the middle, since a traceback ends with its message."""
    raw, length = text.encode(errors="replace"), FILE[name].itemsize
    half = length // 2 - 3
    return raw if len(raw) < length else raw[:half] + b" ... " + raw[-half:]

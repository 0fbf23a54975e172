"""Format of a rank's file: a header, and for each of two threads the actions under way and a ring of the last ones.

All numbers are little-endian and at fixed offsets, so that one ``struct.pack_into`` writes an action. In the file of a
dead rank every action is whole, except perhaps the last.
"""

from __future__ import annotations

import struct
from enum import IntEnum

MAGIC = b"LMACTS01"


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
}
"""Printed names of kinds; others are printed by their name in lower case."""


class State(IntEnum):
    """State of a rank's run as the rank itself wrote it; a rank that has died still says RUNNING."""

    RUNNING = 0
    FINISHED = 1
    RAISED = 2
    LOST = 3


RECORD = struct.Struct("<QqqqQIiiiHHhH")
"""Number (from 1), begin, begin of the wait, end (nanoseconds of the clock), bytes, number within the group, step,
micro-batch, peer, kind, group, stage, 1 if the header's detail belongs to it."""
ENDED = struct.Struct("<q")
NUMBER = struct.Struct("<Q")
WAITED_AT, ENDED_AT = 16, 24

HEADER = struct.Struct("<8siiiiqqqqiqi")
"""Magic, pid, rank, world size, state, begin, begin of the state, start of the process, time of the last sign of life,
and as other ranks saw it: state of the process, time, exit status."""
PROCESS_STATE = struct.Struct("<iqi")
STATE = struct.Struct("<i")
SINCE = struct.Struct("<q")
BEAT = struct.Struct("<q")
STATE_AT, SINCE_AT, BEAT_AT = 20, 32, 48
PROCESS_STATE_AT = HEADER.size - PROCESS_STATE.size
DETAIL_AT, DETAIL = 128, 256
ERROR_AT, ERROR = 384, 640
FAILED_AT = 1024
"""Offset of the actions that were under way where an error began."""

RECORD_SIZE = 64
DEPTH = 8
"""Nested actions that are kept while they are under way."""
LAST = 256
"""Actions in a ring."""
THREADS = 2
STACK = DEPTH * RECORD_SIZE
THREADS_AT = FAILED_AT + STACK
THREAD_SIZE = STACK + LAST * RECORD_SIZE
SIZE = THREADS_AT + THREADS * THREAD_SIZE

assert RECORD.size == RECORD_SIZE, RECORD.size
assert HEADER.size <= DETAIL_AT


def thread_at(thread: int) -> int:
    """Offset of a thread's part."""
    return THREADS_AT + thread * THREAD_SIZE


def text_in(raw: bytes) -> str:
    """Decode a text of fixed length, without its padding."""
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def as_text(text: str, length: int) -> bytes:
    """Encode a text, cut in the middle or padded to a fixed length: a traceback ends with what it is about."""
    raw, half = text.encode(errors="replace"), length // 2 - 3
    return (raw if len(raw) < length else raw[:half] + b" ... " + raw[-half:]).ljust(length, b"\0")

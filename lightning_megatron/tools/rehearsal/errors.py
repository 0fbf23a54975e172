"""The error of a rehearsal."""

from __future__ import annotations


class RehearsalError(Exception):
    """A run needs something that a rehearsal lacks, such as a tensor's values or another rank; the text names it."""

"""The error of a rehearsal."""

from __future__ import annotations


class RehearsalError(Exception):
    """A run needs what a rehearsal has not: the values of a tensor, or another rank's part; the text names it."""

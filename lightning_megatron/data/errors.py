"""What is said when the data, not the configuration, is at fault."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """Bad data. The text names the file, the line where there is one, what is wrong, and what to do."""

    @classmethod
    def at(cls, path: str | Path, fault: str, *, line: int | None = None, do: str = "") -> DataError:
        """The error for a place.

        Args:
            path: the file (or the prefix of a pair) at fault.
            fault: what is wrong, with its numbers.
            line: one-based line, for text files.
            do: what the user can do about it.
        """
        place = f"{path}" if line is None else f"{path}, line {line}"
        return cls(f"{place}: {fault}; {do}" if do else f"{place}: {fault}")

"""Progress of preprocessing: Megatron-LM's lines, or a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

Log = Callable[[str], None]


class DocumentProgress:
    """Progress in documents and bytes.

    Args:
        interval: number of documents between two lines.
        log: function that prints a line; ``None`` is standard error, with a bar if that is a terminal.
    """

    def __init__(self, interval: int, log: Log | None) -> None:
        self._interval, self._given = interval, log
        self._bar: tqdm[None] | None = None
        self._told = 0
        self._begun = time.perf_counter()
        self.documents = self._text = 0

    def begin(self, stored: int) -> None:
        """Start the clock.

        Args:
            stored: bytes of the input as it is stored, the total of the bar.
        """
        self._begun = time.perf_counter()
        if self._given is None and sys.stderr.isatty():
            self._bar = tqdm(total=stored, unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True)

    def say(self, line: str) -> None:
        """Print a line."""
        if self._given is not None:
            self._given(line)
        elif self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def reach(self, documents: int, text: int, stored: int) -> None:
        """Report the progress so far.

        Args:
            documents: number of documents so far.
            text: bytes of their lines.
            stored: bytes of the input so far, as it is stored.
        """
        before, self.documents, text_before, self._text = self.documents, documents, self._text, text
        if self._bar is not None:
            self._bar.update(stored - self._bar.n)
            self._bar.set_postfix(documents=f"{documents:,}", refresh=False)
            return
        for count in range((before // self._interval + 1) * self._interval, documents + 1, self._interval):
            share = (count - before) / (documents - before)
            self._tell(count, text_before + share * (text - text_before))

    def finish(self) -> None:
        """Close the bar, and print a final line unless the last one has the final count."""
        self.close()
        if self._told < self.documents:
            self._tell(self.documents, self._text)

    def close(self) -> None:
        """Close the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _tell(self, documents: int, text: float) -> None:
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        self._told = documents
        rate, megabytes = documents / seconds, text / seconds / 2**20
        self.say(f"Processed {documents} documents ({rate:.2f} docs/s, {megabytes:.4f} MB/s).")

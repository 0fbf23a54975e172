"""The terminal of a run: log lines above a progress bar that fits the width and has the right total."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from tqdm import tqdm

NARROW = 100
"""Width in columns below which rich's bar is left out, so that its text and metrics fit in two rows."""
_LOGGERS = ("", "lightning", "lightning.pytorch", "lightning.fabric", "lightning_megatron")


class _AboveBars:
    """A stream for text above progress bars: those of tqdm are cleared for it, and rich replaces ``sys.stderr``."""

    def write(self, text: str) -> None:
        tqdm.write(text, end="", file=sys.stderr)


class Terminal:
    """Lets log lines stay above a progress bar, from :meth:`open` to :meth:`close`."""

    def __init__(self) -> None:
        self._streams = ExitStack()

    def open(self) -> None:
        """Replace the stream of log handlers that write to stderr; no bar is shown yet."""
        for handler in [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self._streams.callback(handler.setStream, handler.setStream(_AboveBars()))

    def close(self) -> None:
        """Restore the streams of the handlers."""
        self._streams.close()

    def count(self, trainer: Trainer, done: int) -> None:
        """Set the bar's total to all batches, the ``done`` ones included: Lightning sets it to the number left."""
        if (bar := trainer.progress_bar_callback) is None:
            return
        total, size = trainer.num_training_batches, trainer.accumulate_grad_batches
        if trainer.max_steps > 0:
            total = min(total, done + (trainer.max_steps - trainer.global_step) * size - done % size)
        known = None if total == float("inf") else total
        if isinstance(bar, TQDMProgressBar) and trainer.is_global_zero:
            bar.train_progress_bar.total = known
        elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
            from rich.progress import BarColumn

            bar.progress.update(bar.train_progress_bar_id, total=known)
            if bar.progress.console.width < NARROW:
                bar.progress.columns = tuple(c for c in bar.progress.columns if not isinstance(c, BarColumn))

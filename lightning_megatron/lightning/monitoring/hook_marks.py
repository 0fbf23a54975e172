"""Records of the time between the phases of the strategy: waiting for data, hooks of a save or a load."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_megatron.recorder.file_format import Kind
from lightning_megatron.recorder.recorder import ActionLog


class HookMarks(Callback):
    """Callback that records a rank's activity; the next phase of the strategy, or the next mark, ends it."""

    reads_parameters = False

    def __init__(self, action_log: ActionLog, trainer: Trainer, runs_ahead: bool = False) -> None:
        self._action_log, self._trainer, self._runs_ahead = action_log, trainer, runs_ahead
        self._token: int | None = None

    def begin(self, kind: Kind) -> None:
        """Start an activity; end the previous one."""
        self.end()
        self._action_log.step = self._trainer.global_step
        self._token = self._action_log.begin(kind)

    def end(self) -> None:
        """End the activity."""
        token, self._token = self._token, None
        if token is not None:
            self._action_log.end(token)

    def _wait_for_data(self, *args: Any, **kwargs: Any) -> None:
        """Start to wait for data, at the start of a loop or the end of a batch."""
        self.begin(Kind.DATA)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the wait for the metrics of the progress bar: Lightning reads them next, with or without a bar."""
        self.end()
        if self._runs_ahead:
            with self._action_log.during(Kind.DEVICE):
                _ = self._trainer.progress_bar_metrics
        self._wait_for_data()

    def _go_on(self, *args: Any, **kwargs: Any) -> None:
        """End the wait: a batch has come, or there is none left."""
        self.end()

    on_train_epoch_start = _wait_for_data
    on_validation_epoch_start = on_validation_batch_end = _wait_for_data
    on_test_epoch_start = on_test_batch_end = _wait_for_data
    on_predict_epoch_start = on_predict_batch_end = _wait_for_data
    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _go_on
    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _go_on

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Start the hooks of a save; writing is a phase that the strategy records."""
        self.begin(Kind.SAVE)

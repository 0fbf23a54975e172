"""``example_input_array`` of a module, on which Lightning calls the model outside of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_megatron.config.layout import ParallelLayout
from lightning_megatron.lightning.compat._private import logs_graph


class ExampleInput(Callback):
    """Hides the example from Lightning's start of a run where a call of the model would fail, with a warning.

    Rank 0 alone traces the model for a graph. A stage of a pipeline is called in a step alone.
    """

    reads_parameters = False

    def __init__(self, layout: ParallelLayout) -> None:
        self._layout = layout
        self._hidden: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hide it from the loggers of an evaluation."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._hide(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hide it, also where ``configure_model`` has set it."""
        self._hide(trainer, pl_module)

    def _hide(self, trainer: Trainer, module: LightningModule) -> None:
        lacking = [] if module.example_input_array is None else list(self._lacking(trainer, module))
        for warning in lacking:
            rank_zero_warn(warning)
        if lacking:
            self._hidden, module.example_input_array = module.example_input_array, None

    def _lacking(self, trainer: Trainer, module: LightningModule) -> Iterator[str]:
        """Warnings of what a run lacks without the example."""
        loggers = sorted({type(logger).__name__ for logger in trainer.loggers if logs_graph(logger)})
        if loggers and (not self._layout.is_whole or getattr(module, "model_shape", None) is not None):
            reason = "torch cannot trace layers that several ranks compute together, nor this package's models"
            yield f"{', '.join(loggers)}(log_graph=True) writes no graph: {reason}"
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        summaries = any(isinstance(callback, ModelSummary) for callback in callbacks)
        if summaries and self._layout.pp > 1 and trainer.state.fn == TrainerFn.FITTING:
            yield f"pp={self._layout.pp}: ModelSummary shows no sizes of inputs: a stage is called in a step alone"

    def _show(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None = None) -> None:
        if self._hidden is not None:
            self._hidden, pl_module.example_input_array = None, self._hidden

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_exception = _show

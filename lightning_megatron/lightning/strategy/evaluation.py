"""A strategy whose validation, test and prediction run on every micro-batch and pipeline stage."""

from __future__ import annotations

from typing import Any

from lightning_megatron import device as devices
from lightning_megatron.lightning.step.engine import StepEngine
from lightning_megatron.lightning.strategy.recording import RecordedStrategy, recorded
from lightning_megatron.recorder.file_format import Kind


class EvaluatingStrategy(RecordedStrategy):
    """Steps that differentiate nothing."""

    _engine: StepEngine | None = None
    _broadcast_predictions: bool = True

    @property
    def engine(self) -> StepEngine:
        """The engine that runs the steps; there once the environment is set up."""
        assert self._engine is not None
        return self._engine

    @recorded(Kind.VALIDATION_STEP)
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``validation_step`` on every micro-batch."""
        return self._evaluate("validation_step", *args, **kwargs)

    @recorded(Kind.TEST_STEP)
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``test_step`` on every micro-batch."""
        return self._evaluate("test_step", *args, **kwargs)

    @recorded(Kind.PREDICT_STEP)
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A user's ``predict_step`` on every micro-batch, outputs joined."""
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self.finish_param_gather()
        batch, *rest = [*args, *kwargs.values()]
        micro_batches = self.engine.split(batch)
        with self.precision_plugin.forward_context():
            if micro_batches is None:
                output = getattr(module, name)(*args, **kwargs)
                devices.mark_step(self.root_device)
                return output
            broadcast = name == "predict_step" and self._broadcast_predictions
            return self.engine.evaluate(module, name, micro_batches, tuple(rest), broadcast)

"""Callbacks that know about parallel ranks; none is needed to train."""

from lightning_megatron.lightning.callbacks.expert_telemetry import ExpertTelemetry
from lightning_megatron.lightning.callbacks.throughput import Throughput

__all__ = ["ExpertTelemetry", "Throughput"]

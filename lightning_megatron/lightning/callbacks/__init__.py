"""Callbacks that know about parallel ranks; none is needed to train."""

from lightning_megatron.lightning.callbacks.expert_telemetry import ExpertTelemetry
from lightning_megatron.lightning.callbacks.kill_switch import KillSwitch
from lightning_megatron.lightning.callbacks.spike_guard import SpikeGuard
from lightning_megatron.lightning.callbacks.straggler_monitor import StragglerMonitor
from lightning_megatron.lightning.callbacks.throughput import Throughput
from lightning_megatron.lightning.callbacks.upload_checkpoints import UploadCheckpoints
from lightning_megatron.lightning.callbacks.verify_checkpoint import VerifyCheckpoint

__all__ = [
    "ExpertTelemetry",
    "KillSwitch",
    "SpikeGuard",
    "StragglerMonitor",
    "Throughput",
    "UploadCheckpoints",
    "VerifyCheckpoint",
]

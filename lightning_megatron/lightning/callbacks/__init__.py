"""Callbacks that know about parallel ranks; none is needed to train.

The names below are imported at their first use.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_exports import exports_of

if TYPE_CHECKING:
    from lightning_megatron.lightning.callbacks.batch_size_finder import MegatronBatchSizeFinder
    from lightning_megatron.lightning.callbacks.device_profiler import DeviceProfiler
    from lightning_megatron.lightning.callbacks.expert_telemetry import ExpertTelemetry
    from lightning_megatron.lightning.callbacks.gaudi_telemetry import GaudiTelemetry
    from lightning_megatron.lightning.callbacks.megatron_log import MegatronLog
    from lightning_megatron.lightning.callbacks.spike_guard import SpikeGuard
    from lightning_megatron.lightning.callbacks.straggler_monitor import StragglerMonitor
    from lightning_megatron.lightning.callbacks.throughput import Throughput
    from lightning_megatron.lightning.callbacks.upload_checkpoints import UploadCheckpoints
    from lightning_megatron.lightning.callbacks.verify_checkpoint import VerifyCheckpoint
    from lightning_megatron.lightning.strategy.kill_switch import KillSwitch

__all__ = [
    "DeviceProfiler",
    "ExpertTelemetry",
    "GaudiTelemetry",
    "KillSwitch",
    "MegatronBatchSizeFinder",
    "MegatronLog",
    "SpikeGuard",
    "StragglerMonitor",
    "Throughput",
    "UploadCheckpoints",
    "VerifyCheckpoint",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = exports_of(__name__)

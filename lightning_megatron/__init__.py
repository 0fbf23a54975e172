"""Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer.

The names below are imported at their first use, so that programs without Lightning do not wait for its import.
"""

from typing import TYPE_CHECKING

from lightning_megatron.errors import print_errors_briefly
from lightning_megatron.lazy_exports import exports_of
from lightning_megatron.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_megatron.adapters.lora import LoRA
    from lightning_megatron.config.layout import ParallelLayout
    from lightning_megatron.config.transformer import TransformerConfig
    from lightning_megatron.encoders.bert.data_module import BertDataModule
    from lightning_megatron.encoders.bert.module import BertModule
    from lightning_megatron.encoders.t5.data_module import T5DataModule
    from lightning_megatron.encoders.t5.module import T5Module
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from lightning_megatron.lightning.callbacks import (
        DeviceProfiler,
        ExpertTelemetry,
        GaudiTelemetry,
        KillSwitch,
        MegatronBatchSizeFinder,
        MegatronLog,
        SpikeGuard,
        StragglerMonitor,
        Throughput,
        UploadCheckpoints,
        VerifyCheckpoint,
    )
    from lightning_megatron.lightning.compat.accelerator import HPUAccelerator
    from lightning_megatron.lightning.datamodules.chat_data import ChatDataModule
    from lightning_megatron.lightning.datamodules.datamodule import MegatronDataModule
    from lightning_megatron.lightning.modules.base_module import MegatronModule
    from lightning_megatron.lightning.modules.decoder import BloomModule, GPTModule, LlamaModule, MixtralModule
    from lightning_megatron.lightning.modules.load_module import load_module, read_checkpoint
    from lightning_megatron.lightning.step.precision import MegatronPrecision
    from lightning_megatron.lightning.strategy.megatron import MegatronHPUStrategy, MegatronStrategy

__all__ = [
    "BertDataModule",
    "BertModule",
    "BloomModule",
    "ChatDataModule",
    "ColumnParallelLinear",
    "ConfigError",
    "DeviceProfiler",
    "ExpertTelemetry",
    "GPTModule",
    "GaudiTelemetry",
    "HPUAccelerator",
    "KillSwitch",
    "LlamaModule",
    "LoRA",
    "MegatronBatchSizeFinder",
    "MegatronDataModule",
    "MegatronHPUStrategy",
    "MegatronLog",
    "MegatronModule",
    "MegatronPrecision",
    "MegatronStrategy",
    "MixtralModule",
    "ParallelLayout",
    "RowParallelLinear",
    "SpikeGuard",
    "StragglerMonitor",
    "T5DataModule",
    "T5Module",
    "Throughput",
    "TransformerConfig",
    "UploadCheckpoints",
    "VerifyCheckpoint",
    "VocabParallelEmbedding",
    "load_module",
    "read_checkpoint",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one
    __getattr__, __dir__ = exports_of(__name__)

register_with_lightning()
print_errors_briefly()

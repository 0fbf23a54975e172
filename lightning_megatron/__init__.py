"""Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer."""

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.config import ConfigError, ParallelLayout
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from lightning_megatron.lightning.accelerator import HPUAccelerator
from lightning_megatron.lightning.callbacks import ExpertTelemetry, KillSwitch, Throughput, VerifyCheckpoint
from lightning_megatron.lightning.datamodule import MegatronDataModule
from lightning_megatron.lightning.module import GPTModule, LlamaModule, MegatronModule, MixtralModule
from lightning_megatron.lightning.precision import MegatronPrecision
from lightning_megatron.lightning.strategy import MegatronHPUStrategy, MegatronStrategy
from lightning_megatron.models.config import TransformerConfig

MegatronStrategy.register_strategies(StrategyRegistry)
HPUAccelerator.register_accelerators(AcceleratorRegistry)

__all__ = [
    "ColumnParallelLinear",
    "ConfigError",
    "ExpertTelemetry",
    "GPTModule",
    "HPUAccelerator",
    "KillSwitch",
    "LlamaModule",
    "MegatronDataModule",
    "MegatronHPUStrategy",
    "MegatronModule",
    "MegatronPrecision",
    "MegatronStrategy",
    "MixtralModule",
    "ParallelLayout",
    "RowParallelLinear",
    "Throughput",
    "TransformerConfig",
    "VerifyCheckpoint",
    "VocabParallelEmbedding",
]

"""Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer.

The names below are imported at their first use, so that programs without Lightning do not wait for its import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_megatron.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_megatron.config.layout import ParallelLayout
    from lightning_megatron.config.transformer import TransformerConfig
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from lightning_megatron.lightning.accelerator import HPUAccelerator
    from lightning_megatron.lightning.base_module import MegatronModule
    from lightning_megatron.lightning.callbacks import (
        ExpertTelemetry,
        KillSwitch,
        SpikeGuard,
        StragglerMonitor,
        Throughput,
        UploadCheckpoints,
        VerifyCheckpoint,
    )
    from lightning_megatron.lightning.datamodule import MegatronDataModule
    from lightning_megatron.lightning.module import GPTModule, LlamaModule, MixtralModule
    from lightning_megatron.lightning.precision import MegatronPrecision
    from lightning_megatron.lightning.pretrained.load_module import load_module, read_checkpoint
    from lightning_megatron.lightning.strategy.megatron import MegatronHPUStrategy, MegatronStrategy

_MODULES = {
    "config.layout": ("ParallelLayout",),
    "config.transformer": ("TransformerConfig",),
    "errors": ("ConfigError",),
    "layers": ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    "lightning.accelerator": ("HPUAccelerator",),
    "lightning.base_module": ("MegatronModule",),
    "lightning.callbacks": (
        "ExpertTelemetry",
        "KillSwitch",
        "SpikeGuard",
        "StragglerMonitor",
        "Throughput",
        "UploadCheckpoints",
        "VerifyCheckpoint",
    ),
    "lightning.datamodule": ("MegatronDataModule",),
    "lightning.module": ("GPTModule", "LlamaModule", "MixtralModule"),
    "lightning.precision": ("MegatronPrecision",),
    "lightning.pretrained.load_module": ("load_module", "read_checkpoint"),
    "lightning.strategy.megatron": ("MegatronHPUStrategy", "MegatronStrategy"),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

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
    "SpikeGuard",
    "StragglerMonitor",
    "Throughput",
    "TransformerConfig",
    "UploadCheckpoints",
    "VerifyCheckpoint",
    "VocabParallelEmbedding",
    "load_module",
    "read_checkpoint",
]

if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Import the module of a public name, once."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_lightning()

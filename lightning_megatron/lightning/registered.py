"""Names that Lightning looks up: the strategy and the accelerator in its registries, classes for LightningCLI."""

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.lightning import callbacks, datamodule, module
from lightning_megatron.lightning.accelerator import HPUAccelerator
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

__all__ = ["callbacks", "datamodule", "module"]

MegatronStrategy.register_strategies(StrategyRegistry)
HPUAccelerator.register_accelerators(AcceleratorRegistry)

"""Names that Lightning looks up in its registries: the strategy and the accelerator."""

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.lightning.compat.accelerator import HPUAccelerator
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

MegatronStrategy.register_strategies(StrategyRegistry)
HPUAccelerator.register_accelerators(AcceleratorRegistry)

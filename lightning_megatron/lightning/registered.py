"""Names that Lightning looks up in its registries: the strategy and the accelerator."""

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.lightning.compat.accelerator import HPUAccelerator
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

for name in ("megatron", "megatron_hpu"):
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, MegatronStrategy, description=str(MegatronStrategy.__doc__).splitlines()[0])
HPUAccelerator.register_accelerators(AcceleratorRegistry)

"""Names that Lightning looks up in its registries: the strategy and the accelerator."""

from functools import partial
from importlib.util import find_spec
from typing import NoReturn

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron.errors import ConfigError, Problem
from lightning_megatron.lightning.compat.accelerator import HPUAccelerator
from lightning_megatron.lightning.strategy.megatron import MegatronStrategy

HABANA = {
    "hpu_single": "MegatronStrategy()",
    "hpu_ddp": "MegatronStrategy()",
    "hpu_parallel": "MegatronStrategy()",
    "hpu_fsdp": "MegatronStrategy(tp=, pp=), which cuts layers over cards",
    "hpu_deepspeed": "MegatronStrategy(): its sharded optimizer is ZeRO 1",
}
"""Strategies of lightning-habana, and what replaces each."""


def _refuse(name: str) -> NoReturn:
    reason = f"a strategy of lightning-habana; write {HABANA[name]} (docs/migrate-habana.md)"
    raise ConfigError([Problem("strategy", name, reason, ("megatron",))])


_CLASS = "megatronstrategy"  # the Trainer writes names in small letters, those of a command line too
for name in ("megatron", "megatron_hpu", _CLASS, f"lightning_megatron.{_CLASS}"):
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, MegatronStrategy, description=str(MegatronStrategy.__doc__).splitlines()[0])
if find_spec("lightning_habana") is None:  # which registers them itself
    for name in HABANA:
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, partial(_refuse, name), description="a strategy of lightning-habana")
HPUAccelerator.register_accelerators(AcceleratorRegistry)

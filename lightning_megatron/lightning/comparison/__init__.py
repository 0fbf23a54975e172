"""Ranks that were given different things are named before they begin."""

from lightning_megatron.lightning.strategy.comparison import ComparedStrategy

__all__ = ["ComparedStrategy"]

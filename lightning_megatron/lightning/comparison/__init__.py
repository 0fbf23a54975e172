"""Ranks that were given different things are named before they begin."""

from lightning_megatron.lightning.comparison.strategy import ComparedStrategy

__all__ = ["ComparedStrategy"]

"""Comparison of the settings of all ranks before a run begins."""

from lightning_megatron.lightning.strategy.comparison import ComparedStrategy

__all__ = ["ComparedStrategy"]

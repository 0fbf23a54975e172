"""Averages of weights over time."""

from habana_frameworks.torch.hpex.movingavrg.FusedEMA import FusedEMA

__all__ = ["FusedEMA"]

"""Optimizers of few kernels."""

from habana_frameworks.torch.hpex.optimizers.FusedAdamW import FusedAdamW

__all__ = ["FusedAdamW"]

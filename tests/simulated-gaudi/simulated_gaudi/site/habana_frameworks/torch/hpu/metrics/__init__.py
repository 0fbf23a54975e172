"""Counters of compiled graphs and of ops that fell back to the host, under the bridge's names."""

from habana_frameworks.torch.hpu.metrics.metrics import metric_global

__all__ = ["metric_global"]

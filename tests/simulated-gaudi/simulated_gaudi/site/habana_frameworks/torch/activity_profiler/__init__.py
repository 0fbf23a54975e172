"""Importing it adds the device to torch's profiler, as in the bridge."""

from habana_frameworks.torch.activity_profiler import activity_profiler

__all__ = ["activity_profiler"]

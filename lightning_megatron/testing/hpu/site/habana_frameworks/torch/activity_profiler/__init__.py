"""Importing it makes torch's profiler know the device, as in the bridge."""

from habana_frameworks.torch.activity_profiler import activity_profiler

__all__ = ["activity_profiler"]

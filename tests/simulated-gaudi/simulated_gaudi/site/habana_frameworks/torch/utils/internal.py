"""Mode of the bridge."""

from simulated_hpu.settings import settings


def is_lazy() -> bool:
    """True if ops are collected until a step is marked."""
    return settings().is_lazy

"""Measured rates of the device at hand, as a device file for ``planning``."""

from lightning_megatron.tools.calibration.processes import calibrate

__all__ = ["calibrate"]

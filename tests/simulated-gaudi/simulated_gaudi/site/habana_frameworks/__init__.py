"""Gaudi's Python interface over a simulated device: signatures, refusals and numbers of the real one."""

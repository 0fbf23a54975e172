"""Optimizer state of any layout in one file, and the host memory that it costs."""

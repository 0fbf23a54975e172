"""Checkpoints that are written while training goes on: from a copy in host memory, by a thread."""

"""Checkpoints of other programs: files, configurations, and tensors by our names."""

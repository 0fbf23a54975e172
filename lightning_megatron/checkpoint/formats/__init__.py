"""Checkpoints of other programs: their files, and their tensors by our names."""

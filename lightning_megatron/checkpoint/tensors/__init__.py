"""Tensors to save, by global name and shape, as the pieces that each rank holds."""

"""Comparison of one training in two layouts: which step, layer or gradient differs first."""

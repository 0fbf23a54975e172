"""Fused operations beyond torch's own."""

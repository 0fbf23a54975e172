"""Flat buffers of parameters and gradients, and their communication."""

"""Attention by kernels of torch that only NVIDIA's devices have."""

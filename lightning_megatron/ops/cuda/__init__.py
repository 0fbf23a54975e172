"""Operations of torch that only NVIDIA's devices have."""

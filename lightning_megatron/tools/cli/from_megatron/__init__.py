"""Command lines of Megatron-LM, its fork for Gaudi and Megatron-DeepSpeed as recipes."""

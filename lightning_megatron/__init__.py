"""Train large transformers with Megatron's parallelism from an ordinary Lightning Trainer."""

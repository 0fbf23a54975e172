"""Text to token files, once before training."""

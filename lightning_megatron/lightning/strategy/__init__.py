"""The strategy, one concern a file; the story of a run begins in megatron.py."""

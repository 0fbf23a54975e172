"""The strategy: Lightning calls hooks.py, users call megatron.py, the other modules hold a part of the state each."""

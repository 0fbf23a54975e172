"""Attention over a sequence that the context-parallel ranks share: each has queries, keys and values of its part."""

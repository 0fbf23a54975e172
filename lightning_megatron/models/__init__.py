"""Transformers: one configuration, one block, and for each family only its differences."""

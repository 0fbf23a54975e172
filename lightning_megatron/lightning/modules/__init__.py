"""Modules of model families; all share the training of :class:`TransformerModule`."""

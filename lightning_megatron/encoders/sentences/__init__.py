"""Samples with masked tokens, from documents that are stored sentence by sentence."""

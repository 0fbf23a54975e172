"""BERT: an encoder with two heads."""

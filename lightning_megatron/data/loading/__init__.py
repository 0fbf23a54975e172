"""Samples of one replica in order, and loaders that resume in the middle of an epoch."""

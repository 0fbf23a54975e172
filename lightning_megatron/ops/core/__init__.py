"""Arguments that all implementations of an op take."""

"""Weights from files: of other programs, of this package, into modules with and without a Trainer."""

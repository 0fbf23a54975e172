"""Weights from elsewhere, and weights without a Trainer."""

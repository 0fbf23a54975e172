"""Implementations for processors that need more than an expression in torch."""

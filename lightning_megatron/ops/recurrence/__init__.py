"""Recurrences along a sequence."""

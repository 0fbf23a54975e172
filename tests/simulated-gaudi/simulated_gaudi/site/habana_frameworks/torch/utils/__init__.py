"""Helpers of the bridge."""

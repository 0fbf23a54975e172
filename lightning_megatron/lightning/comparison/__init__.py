"""Comparison of the settings of all ranks before a run begins."""

"""Compilation of graphs for the device."""

"""Measurements of a run: times of its steps, slow ranks, the size of its model."""

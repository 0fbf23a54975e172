"""Time of a training step by closed formulas: one file for each subject, combined by ``step.time_of``."""

"""Time of a training step by closed formulas: one file a subject, ``step.time_of`` puts them together."""

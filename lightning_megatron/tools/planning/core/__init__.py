"""A job, its parameters and its device: inputs of the formulas of both memory and time."""

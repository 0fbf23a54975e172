"""A job, its parameters and its device: what the formulas of memory and time share."""

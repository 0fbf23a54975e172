"""Private names of Lightning and torch in one table, and the accelerator for Gaudi."""

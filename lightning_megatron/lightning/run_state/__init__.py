"""State of a run in its checkpoint: hyper-parameters, versions, progress, random numbers."""

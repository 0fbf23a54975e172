"""The state of a run in checkpoints: loops, callbacks, random generators, versions of the weights."""

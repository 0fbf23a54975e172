"""Runs that are asked to stop: signals, agreement of all ranks, requeueing."""

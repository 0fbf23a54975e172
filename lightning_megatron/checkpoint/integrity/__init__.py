"""Checks of a checkpoint's files and tensors: before it is published, and before it is loaded."""

"""Recipes on the command line: by name, listed, scaled down for a CPU, with paths from the environment."""

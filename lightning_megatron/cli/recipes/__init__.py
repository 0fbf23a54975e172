"""Recipes on the command line: by name, listed, in small on a CPU, with paths from the environment."""

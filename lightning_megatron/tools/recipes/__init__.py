"""Recipes: the ones of this package by name, and any as data, with paths from the environment."""

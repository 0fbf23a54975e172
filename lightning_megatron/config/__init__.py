"""Sizes and layouts as the user gives them: frozen dataclasses that validate themselves, without processes."""

"""Sizes and layouts as a user gives them: frozen values that check themselves, without processes."""

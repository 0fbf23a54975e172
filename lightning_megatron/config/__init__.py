"""Sizes and layouts as the user gives them: frozen values that check themselves, without processes."""

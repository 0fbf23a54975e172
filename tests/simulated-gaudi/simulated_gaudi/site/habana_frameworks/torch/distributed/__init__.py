"""Several HPUs."""

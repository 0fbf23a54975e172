"""The launcher, and the processes that it starts."""

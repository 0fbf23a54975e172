"""Checks of a job before any process is started."""

"""The choice of a checkpoint to read: checks of its files, and the newest sound one of a folder."""

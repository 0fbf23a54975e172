"""Work on whole token files: merging, statistics, demo text."""

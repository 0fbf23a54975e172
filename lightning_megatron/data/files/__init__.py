"""Work with whole token files: merged, described, made for a try."""

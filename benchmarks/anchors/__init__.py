"""Published points of other programs, translated into planned jobs."""

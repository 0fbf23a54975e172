"""Rehearsal of one rank of any job, in one process and without its memory: ``rehearse`` and ``rehearse_job``."""

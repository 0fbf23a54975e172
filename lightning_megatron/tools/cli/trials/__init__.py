"""Commands that try a job out: a rehearsal without devices, and a comparison of layouts."""

"""The last actions of every rank, in a file that outlives it: they show which rank hung or died first, and in what."""

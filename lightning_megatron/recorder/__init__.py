"""The last actions of every rank, in a small file that outlives it: who hung or died first, and in what."""

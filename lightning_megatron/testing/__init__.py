"""Tools for tests of parallel code, ours and yours: a pool of gloo ranks and comparisons with one process."""

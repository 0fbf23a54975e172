"""Switches of the distributed optimizer, and which optimizers may be sharded."""

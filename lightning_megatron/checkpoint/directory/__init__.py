"""The directory of a checkpoint: its final name, its owner, the lock on its folder, the newest good one."""

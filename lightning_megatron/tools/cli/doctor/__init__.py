"""``lightning-megatron doctor``: findings about an installation, and short trials of its devices."""
